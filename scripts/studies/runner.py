"""Runs studies in processes of their own, each with a time limit, and keeps what they leave behind.

A study that crashes, hangs or runs out of memory does not lose the others. This module loads no
torch, so that it works where torch does not.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dlrm_sharded.files.json_files import read_json_object, write_json
from dlrm_sharded.files.provenance import commit, versions
from dlrm_sharded.files.text_table import Column, TextTable
from studies.archive import write_archive
from studies.processes import tied_command
from studies.store import Cases, cases_path, changes, conditions, keep_settings
from studies.study import Study, figures_path

ROOT = Path(__file__).resolve().parents[2]
PYTHON_PATH = (ROOT, ROOT / "launch", ROOT / "scripts")
"""Folders that the processes of steps import from, wherever the package is installed."""

MOST_NAMES = 8
"""Names of missing cases that a text lists."""

NUM_LAST_LINES = 15
"""Lines of the log of a step that did not succeed, in its JSON."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Describes how a study ended.

    Args:
        status: "ok", "failed", "timed out", "stopped", "no time left" or "no files"; the last two
            were not started, and the one before was killed together with its runner.
        is_earlier: whether an earlier call ran it.
        figures: what it found out, also if it did not succeed.
        headline: the main figures, for people.
        failures: checks of its figures that failed.
        last_lines: end of its log, if it did not succeed.
        num_finished: its cases that need not be run again, if it did not succeed and has cases.
        missing: names of the others.
        conditions: what its figures depend on; empty in files of earlier versions.
    """

    step: str
    status: str
    is_earlier: bool = False
    seconds: float | None = None
    limit_s: float | None = None
    exit_code: int | None = None
    device: str | None = None
    headline: Mapping[str, str] = field(default_factory=dict)
    failures: Sequence[str] = ()
    figures: Mapping[str, Any] = field(default_factory=dict)
    last_lines: Sequence[str] = ()
    load_average: Mapping[str, Sequence[float]] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    commit: str | None = None
    num_finished: int = 0
    missing: Sequence[str] = ()
    conditions: Mapping[str, str] = field(default_factory=dict)


class Runner:
    """Runs studies in a folder, where an earlier runner may have run some of them.

    Args:
        command: returns the command of a study, given the seconds that it has.
        settings: what all studies in the folder have in common.

    Raises:
        ConfigError: the folder has studies with other settings.
    """

    def __init__(
        self,
        out: Path,
        *,
        command: Callable[[Study, float], Sequence[str]],
        settings: Mapping[str, Any],
    ) -> None:
        self._out = out
        self._command = command
        keep_settings(out, settings)
        self._conditions = conditions()

    def run(self, steps: Sequence[Study], limit_s: float) -> list[Outcome]:
        """Run the studies that have not succeeded yet, for at most `limit_s` in all."""
        ends_at = time.monotonic() + limit_s
        outcomes: list[Outcome] = []
        for step in steps:
            outcomes.append(self._outcome(step, ends_at))
            self._write_summary()
            write_archive(self._out)
            print(f"{step.name}: {_status_text(outcomes[-1])}", flush=True)
        return outcomes

    def _outcome(self, step: Study, ends_at: float) -> Outcome:
        cases_file = cases_path(self._out, step.name)
        earlier = self.earlier(step)
        if earlier is not None and earlier.status == "ok":
            other = changes(earlier.conditions, self._conditions) if earlier.conditions else ""
            if not other:
                cases_file.unlink(missing_ok=True)  # a kill may have left it
                return earlier
            print(f"{step.name}: does not count, as it was run under other conditions ({other})")
        if step.needs and not any(any(self._out.glob(pattern)) for pattern in step.needs):
            return Outcome(step.name, "no files", headline={"needs": " or ".join(step.needs)})
        seconds = min(step.limit_s, ends_at - time.monotonic())
        if seconds < step.least_s:
            return Outcome(
                step.name,
                "no time left",
                headline={"needs": f"{step.least_s:.0f} s"},
                **self._progress(step),
            )
        print(f"{step.name}: at most {seconds:.0f} s", flush=True)
        cases = Cases(cases_file, self._conditions)
        if cases.num_other:
            print(f"{step.name}: {cases.num_other} cases were run under other conditions")
        if cases.ended:
            print(f"{step.name}: goes on after {cases.num_finished} finished cases", flush=True)
        outcome = self._run(step, seconds)
        write_json(self._json_path(step.name), dataclasses.asdict(outcome))
        figures_path(self._out, step.name).unlink(missing_ok=True)
        if outcome.status == "ok":
            cases_file.unlink(missing_ok=True)  # who removes the JSON file repeats the whole step
        return outcome

    def _run(self, step: Study, seconds: float) -> Outcome:
        write_json(figures_path(self._out, step.name), {})  # it is there while the step runs
        log_path = self._out / f"{step.name}.log"
        load_before, started = os.getloadavg(), time.monotonic()
        with log_path.open("wb") as log:
            process = subprocess.Popen(
                tied_command(self._command(step, seconds)),
                cwd=self._out,
                env=_environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                exit_code = process.wait(seconds)
                status = "failed" if exit_code else "ok"
            except subprocess.TimeoutExpired:
                status = "timed out"
            finally:
                if process.poll() is None:
                    kill_tree(process.pid)
                exit_code = process.wait()
        left_behind = self._left_behind(step, is_ok=status == "ok")
        return Outcome(
            step.name,
            status,
            seconds=round(time.monotonic() - started, 1),
            limit_s=round(seconds, 1),
            exit_code=exit_code,
            last_lines=[] if status == "ok" else last_lines(log_path),
            load_average={"before": load_before, "after": os.getloadavg()},
            versions=versions(),
            commit=commit(),
            conditions=self._conditions,
            **left_behind,
        )

    def earlier(self, step: Study) -> Outcome | None:
        """Return how the study ended the last time that it ran; None if it never ran."""
        path, figures = self._json_path(step.name), figures_path(self._out, step.name)
        written = path.stat().st_mtime_ns if path.exists() else 0
        if figures.exists() and figures.stat().st_mtime_ns > written:
            left_behind = self._left_behind(step, is_ok=False)
            return Outcome(step.name, "stopped", is_earlier=True, **left_behind)
        if not written:
            return None
        return Outcome(**read_json_object(path, noun="step") | {"is_earlier": True})

    def _left_behind(self, step: Study, *, is_ok: bool) -> dict[str, Any]:
        """Return the fields of `Outcome` that the step has written, and which cases it lacks."""
        path = figures_path(self._out, step.name)
        fields = read_json_object(path, noun="figures") if path.exists() else {}
        return fields if is_ok else fields | self._progress(step)

    def _progress(self, step: Study) -> dict[str, Any]:
        """Return the fields of `Outcome` about cases of a step that has not succeeded."""
        cases = Cases(cases_path(self._out, step.name))
        return {"num_finished": cases.num_finished, "missing": cases.missing}

    def _write_summary(self) -> None:
        """Write what is known of all steps, also of those that this call does not run."""
        known = [
            read_json_object(path, noun="step")
            for path in sorted(self._out.glob("*.json"))
            if path.stem not in ("settings", "summary") and "." not in path.stem
        ]
        keys = ("status", "seconds", "device", "headline", "failures")
        steps = {one["step"]: {key: one[key] for key in keys} for one in known if "step" in one}
        write_json(self._out / "summary.json", {"steps": steps})

    def _json_path(self, name: str) -> Path:
        return self._out / f"{name}.json"


def last_lines(log_path: Path) -> list[str]:
    return log_path.read_text(errors="replace").splitlines()[-NUM_LAST_LINES:]


def kill_tree(pid: int) -> None:
    """Kill a process and those that it started, also in sessions of their own, as torchrun does."""
    for other in (*descendants(pid), pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(other, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)  # those whose parent has ended


def descendants(pid: int) -> Iterator[int]:
    """Yield the ids of all processes below a process."""
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                yield int(child)
                yield from descendants(int(child))


def closing_table(outcomes: Sequence[Outcome]) -> str:
    """Return a table of the steps, for people."""
    rows = [
        (one.step, _status_text(one), one.seconds, "; ".join(_main_figures(one)))
        for one in outcomes
    ]
    return TextTable(["step", "status", Column("s", ".0f"), "figures"], rows).markdown()


def _main_figures(outcome: Outcome) -> Iterator[str]:
    yield from (f"{name} {text}" for name, text in outcome.headline.items())
    yield from outcome.failures or outcome.last_lines[-1:]
    if outcome.missing:
        yield missing_text(outcome)


def missing_text(outcome: Outcome) -> str:
    """Return which cases of a step are finished, which are not, and what to do."""
    num_missing = len(outcome.missing)
    names = ", ".join(
        [*outcome.missing[:MOST_NAMES], *(["..."] if num_missing > MOST_NAMES else [])]
    )
    return (
        f"{outcome.num_finished} of {outcome.num_finished + num_missing} cases are finished; the "
        f"same command runs the others: {names}"
    )


def _status_text(outcome: Outcome) -> str:
    text = outcome.status
    if text == "timed out" and outcome.missing:
        text = f"{text} after {outcome.num_finished} cases"
    return f"{text}, earlier" if outcome.is_earlier else text


def _environment() -> dict[str, str]:
    """Return the environment of a step; lookups on a CPU are measured with one thread."""
    before = os.environ.get("PYTHONPATH")
    paths = [*map(str, PYTHON_PATH), *([before] if before else [])]
    return {"OMP_NUM_THREADS": "1", **os.environ} | {
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONUNBUFFERED": "1",
    }
