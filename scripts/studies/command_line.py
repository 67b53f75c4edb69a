"""The command line of sets of studies: which of them run, for how long, in which folder."""

from __future__ import annotations

import argparse
import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlrm_sharded.files.errors import ConfigError
from dlrm_sharded.runs.owner import claim
from studies.archive import write_archive
from studies.runner import Outcome, Runner, closing_table
from studies.study import Study
from studies.worker import worker_command


def run_steps(
    steps: Sequence[Study],
    *,
    package: str,
    description: str | None,
    limit_s: float,
    default_out: Path | None = None,
    settings: Mapping[str, Any] | None = None,
    report: Callable[[Path, Sequence[Outcome]], str] | None = None,
    preload: Sequence[str] = (),
) -> int:
    """Run the steps that the command line chooses, print their table, and return the exit code.

    Args:
        package: package whose modules have the names of the steps.
        description: help text of the script.
        limit_s: default time of a call.
        default_out: folder of the figures if the command line names none; None if it must.
        settings: what all steps in a folder have in common, beside their sizes.
        report: writes what is known of all steps and returns a line about it.
        preload: modules that a process imports before the first step begins; the time counts for
            the call, but for no step.
    """
    options = _options(steps, description, limit_s, default_out)
    started = time.monotonic()
    if preload and not options.small:
        _import_once(preload, limit_s=options.limit_s)
    try:
        ended = run_in(
            options.out,
            steps,
            package=package,
            chosen=options.steps.split(","),
            limit_s=options.limit_s - (time.monotonic() - started),
            settings={"small": options.small, **(settings or {})},
        )
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if report is not None:
        print(report(options.out.resolve(), ended.known))
    print(f"to bring back: {write_archive(options.out.resolve())}")
    return ended.exit_code


def _import_once(modules: Sequence[str], *, limit_s: float) -> None:
    """Load modules from a disk that may be cold; if that fails, the steps say why."""
    command = [sys.executable, "-c", f"import {', '.join(modules)}"]
    with contextlib.suppress(subprocess.TimeoutExpired):
        subprocess.run(command, timeout=limit_s, capture_output=True, check=False)


@dataclass(frozen=True, slots=True)
class Ended:
    """How the studies of a folder have ended.

    Args:
        known: all that were ever run in the folder, or tried now.
        exit_code: 0 if all that were chosen have succeeded, now or before.
    """

    known: Sequence[Outcome]
    exit_code: int


def run_in(
    out: Path,
    studies: Sequence[Study],
    *,
    package: str,
    chosen: Sequence[str],
    limit_s: float,
    settings: Mapping[str, Any],
) -> Ended:
    """Run the chosen studies in a folder as far as time allows, and print their table.

    Raises:
        ConfigError: the folder has studies with other settings, or another job works in it.
    """
    signal.signal(signal.SIGTERM, _end)
    out = out.resolve()
    claim(out, key="folder")  # two runs would measure each other
    runner = Runner(
        out,
        command=lambda study, seconds: worker_command(
            study, package, out, seconds, settings["small"]
        ),
        settings=settings,
    )
    outcomes = runner.run([study for study in studies if study.name in chosen], limit_s)
    print(f"\n{closing_table(outcomes)}\n\nfigures: {out}")
    by_name = {outcome.step: outcome for outcome in outcomes}
    known = (by_name.get(study.name) or runner.earlier(study) for study in studies)
    is_ok = all(outcome.status == "ok" for outcome in outcomes)
    return Ended([outcome for outcome in known if outcome is not None], 0 if is_ok else 1)


def _options(
    steps: Sequence[Study], description: str | None, limit_s: float, default_out: Path | None
) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [step.name for step in steps]
    parser.add_argument(
        "out",
        type=Path,
        nargs=None if default_out is None else "?",
        default=default_out,
        help="folder of the figures; a new one, or an earlier"
        + ("" if default_out is None else " [%(default)s]"),
    )
    parser.add_argument("--steps", default=",".join(names), help="names with commas [%(default)s]")
    parser.add_argument("--small", action="store_true", help="rehearse with small sizes")
    parser.add_argument(
        "--limit-s", type=float, default=limit_s, help="time of this call, s [%(default)s]"
    )
    options = parser.parse_args()
    if unknown := set(options.steps.split(",")) - set(names):
        parser.error(f"unknown steps {', '.join(sorted(unknown))}; known: {', '.join(names)}")
    return options


def _end(number: int, frame: Any) -> None:
    """End this process as an exception does, so that its step ends too."""
    sys.exit(128 + number)
