"""Defines a study, and what it is given while it runs.

A study is a module with a function `run(study: StudyRun)`. It consists of cases; each is
done whole or not at all and is on disk as soon as it ends; of the figures that they give; of checks
that decide whether it succeeded; and of a headline, which tables and reports show. `studies.runner`
runs it in a process of its own, with a time limit. The command line calls a study a step.
"""

from __future__ import annotations

import functools
import json
import math
import os
import subprocess
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from dlrm_sharded.files.errors import ConfigError
from dlrm_sharded.files.json_files import write_json
from dlrm_sharded.files.provenance import device_name
from studies.processes import tied_command
from studies.store import Cases, cases_path

if TYPE_CHECKING:
    import torch


Commands = tuple[str, ...]
"""Parts with their options, as on a command line."""


@dataclass(frozen=True, slots=True)
class Study:
    """Names a study and its time.

    Args:
        name: module that has its `run`, within the package of the set that it belongs to.
        limit_s: time after which it is killed.
        least_s: time below which it is not started, as it would find out nothing.
        needs: patterns of files of earlier steps, of which it needs one.
        commands: parts with their options, see `studies.parts`, if it has no module of its own.
        small: those of a rehearsal.
        case_s: time of one of their cases.
        title, about: heading and first sentence of its section on a page.
    """

    name: str
    limit_s: float
    least_s: float
    needs: tuple[str, ...] = ()
    commands: Commands = ()
    small: Commands = ()
    case_s: float = 0.0
    title: str = ""
    about: str = ""


Row = dict[str, Any]
"""Figures of a case by name."""

Basis = Literal["measured", "predicted", "simulated"]


@dataclass(frozen=True, slots=True)
class Case:
    """A piece of work of a study whose figures are rows, such as one plan of one task.

    Args:
        key: unique in its study; it says what the work depends on.
        run: does the work and returns its rows.
    """

    key: str
    run: Callable[[], list[Row]]


@dataclass(frozen=True, slots=True)
class Command:
    """A command that has ended, and what it printed."""

    exit_code: int
    output: str
    seconds: float

    @property
    def warnings(self) -> list[str]:
        """Lines that contain a warning, each once."""
        lines = dict.fromkeys(line.strip() for line in self.output.splitlines())
        return [line for line in lines if "warn" in line.lower()]


def figures_path(out: Path, name: str) -> Path:
    """Return the file in which a study keeps its figures until it ends."""
    return out / f"{name}.figures.json"


class StudyRun:
    """A run of a study.

    Every figure is on disk as soon as it is recorded, so that a step that is killed keeps it.

    Args:
        out: folder of all studies, which is also the working directory.
        seconds: time that the study has, from now.
        small: whether to rehearse with small sizes.
    """

    def __init__(self, name: str, out: Path, *, seconds: float, small: bool) -> None:
        self._name = name
        self.out = out
        self.small = small
        self._path = figures_path(out, name)
        self._ends_at = time.monotonic() + seconds
        self._figures: dict[str, Any] = {}
        self._headline: dict[str, str] = {}
        self.failures: list[str] = []
        self._device_name: str | None = None
        self.cases = Cases(cases_path(out, name))

    @property
    def seconds_left(self) -> float:
        return self._ends_at - time.monotonic()

    def device(self, *, or_cpu: bool = False) -> torch.device:
        """Return the device of this machine.

        Args:
            or_cpu: whether the study is also for machines without a GPU.

        Raises:
            ConfigError: it has no usable GPU, and the study needs one and is not a rehearsal.
        """
        import torch  # takes seconds to load, and only some steps need it

        from dlrm_sharded.ranks.distributed import rank_from_environment

        device = rank_from_environment().device
        if device.type != "cuda" and not (self.small or or_cpu):
            raise ConfigError(
                f"torch {torch.__version__}, built for CUDA {torch.version.cuda}, finds no GPU; "
                "look at nvidia-smi for the driver, or rehearse with --small"
            )
        self._device_name = device_name(device)
        self._write()
        return device

    def record(self, name: str, value: Any) -> None:
        """Keep a figure, which is any JSON."""
        self._figures[name] = _rounded(value)
        self._write()

    def show(self, **headline: str) -> None:
        """Name main figures, as text."""
        self._headline |= headline
        self._write()

    def check(self, holds: bool, failure: str) -> None:
        """Let the study fail at its end, and go on, unless something holds."""
        if not holds:
            self.failures.append(failure)
            self._write()

    def case(self, name: str, run: Callable[[], Any], *, seconds: float = 0.0) -> Any:
        """Return the figures of a case, which is run unless an earlier call has finished it.

        They are None if there is no time. A case with a failed check is run again by the next call.

        Args:
            run: returns the figures, which are any JSON.
            seconds: time that the case takes.
        """
        known = self.cases.finished(name)
        if known is not None:
            print(f"{name}: finished earlier", flush=True)
            return known.figures
        if not self.has_time(name, seconds):
            return None
        num_failures = len(self.failures)
        # as an earlier call's are read: JSON has no figure that is no number
        figures = json.loads(json.dumps(run()), parse_constant=lambda _: None)
        self.cases.add(name, figures, self.failures[num_failures:])
        return figures

    def each(
        self,
        cases: Mapping[str, Callable[[], Any]],
        *,
        seconds: float | Callable[[str], float] = 0.0,
        goes_on: bool = False,
    ) -> Iterator[tuple[str, Any]]:
        """Run cases one after the other, record their figures, and yield those that there are.

        Args:
            seconds: time that a case takes.
            goes_on: whether the others are run if one raises an error, which fails the study.
        """
        self.cases.plan(cases)
        for name, run in cases.items():
            needed = seconds(name) if callable(seconds) else seconds
            work = functools.partial(self._caught, name, run) if goes_on else run
            figures = self.case(name, work, seconds=needed)
            if figures is not None:
                self.record(name, figures)
                if not (goes_on and "error" in figures):
                    yield name, figures

    def _caught(self, name: str, run: Callable[[], Any]) -> Any:
        try:
            return run()
        except Exception:  # the other cases may work
            traceback.print_exc()
            error = traceback.format_exc().splitlines()[-1]
            self.check(False, f"{name}: {error}")
            return {"error": error}

    def rows(
        self,
        cases: Iterable[Case],
        basis: Basis,
        *,
        seconds: float = 0.0,
        done: Callable[[Sequence[Row]], None] = lambda rows: None,
    ) -> list[Row]:
        """Run cases, record the rows of all that have ended, and return them.

        Args:
            basis: what the figures are; every row says it, beside the study and the case.
            seconds: time that a case takes; those without it are left out.
            done: called with all rows after each case.
        """
        cases, rows = list(cases), []
        spent_s, loads = 0.0, []
        self.cases.plan(case.key for case in cases)
        for case in cases:
            print(case.key, flush=True)
            found = self.case(case.key, functools.partial(_timed, case), seconds=seconds)
            if found is None:
                break
            names = {"study": self._name, "basis": basis, "case": case.key}
            rows += [names | row for row in found["rows"]]
            spent_s += found["seconds"]
            loads.append(found["load"])
            self.record("rows", rows)
            self.record("seconds", spent_s)
            self.record("loads", [min(loads), max(loads)])
            done(rows)
        self.show(rows=str(len(rows)))
        return rows

    def has_time(self, name: str, seconds: float) -> bool:
        """Return whether there is time for a part of the study, which fails if it is left out.

        Args:
            seconds: time that the part takes.
        """
        missing = f"left out: {self.seconds_left:.0f} s left, needs {seconds:.0f} s"
        has_time = self.seconds_left >= seconds
        if not has_time:
            self.record(name, missing)
        self.check(has_time, f"{name}: {missing}")
        return has_time

    def command(self, command: Sequence[str], *, folder: Path | None = None) -> Command:
        """Run a command, with a copy of its output in the log, and return it.

        Args:
            folder: its working directory, by default that of all studies.
        """
        print(f"$ {' '.join(command)}", flush=True)
        started, output = time.monotonic(), []
        with subprocess.Popen(
            tied_command(command),
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                print(line, end="", flush=True)
                output.append(line)
        return Command(process.returncode, "".join(output), time.monotonic() - started)

    def checked_command(
        self, command: Sequence[str], *, noun: str, folder: Path | None = None
    ) -> Command:
        """Run a command, record how it ended, and let the study fail unless it succeeded.

        Args:
            noun: what to call it in a message.
        """
        done = self.command(command, folder=folder)
        self.record("exit_code", done.exit_code)
        self.record("seconds", done.seconds)
        self.record("warnings", done.warnings)
        self.check(done.exit_code == 0, f"{noun} ended with exit code {done.exit_code}")
        return done

    def _write(self) -> None:
        write_json(
            self._path,
            {
                "device": self._device_name,
                "headline": self._headline,
                "failures": self.failures,
                "figures": self._figures,
            },
        )


def _timed(case: Case) -> dict[str, Any]:
    """Run a case; return its rows, its seconds, and the load of the machine before it."""
    load, started = os.getloadavg()[0], time.perf_counter()
    return {"rows": case.run(), "seconds": time.perf_counter() - started, "load": load}


def _rounded(value: Any) -> Any:
    """Return JSON with numbers of five digits; no figure is known better."""
    if isinstance(value, float):
        return float(f"{value:.5g}") if math.isfinite(value) else str(value)
    if isinstance(value, dict):
        return {str(key): _rounded(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(entry) for entry in value]
    return value
