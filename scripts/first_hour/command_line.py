"""The command line of scripts that run steps: which steps, for how long, in which folder."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dlrm_sharded.files.errors import ConfigError
from dlrm_sharded.runs.owner import claim
from first_hour.runner import Outcome, Runner, Step, closing_table
from first_hour.worker import worker_command


def run_steps(
    steps: Sequence[Step],
    *,
    package: str,
    description: str | None,
    limit_s: float,
    default_out: Path | None = None,
    settings: Mapping[str, Any] | None = None,
    report: Callable[[Path, Sequence[Outcome]], str] | None = None,
) -> int:
    """Run the steps that the command line chooses, print their table, and return the exit code.

    Args:
        package: package whose modules have the names of the steps.
        description: help text of the script.
        limit_s: default time of a call.
        default_out: folder of the figures if the command line names none; None if it must.
        settings: what all steps in a folder have in common, beside their sizes.
        report: writes what is known of all steps and returns a line about it.
    """
    options = _options(steps, description, limit_s, default_out)
    signal.signal(signal.SIGTERM, _end)
    out = options.out.resolve()
    chosen = [step for step in steps if step.name in options.steps.split(",")]
    try:
        claim(out, key="folder")  # two runs would measure each other
        runner = Runner(
            out,
            command=lambda step, seconds: worker_command(
                f"{package}.{step.name}", out, seconds, options.small
            ),
            settings={"small": options.small, **(settings or {})},
        )
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    outcomes = runner.run(chosen, options.limit_s)
    print(f"\n{closing_table(outcomes)}\n\nfigures: {out}")
    if report is not None:
        by_name = {outcome.step: outcome for outcome in outcomes}
        known = (by_name.get(step.name) or runner.earlier(step) for step in steps)
        print(report(out, [outcome for outcome in known if outcome is not None]))
    return 0 if all(outcome.status == "ok" for outcome in outcomes) else 1


def _options(
    steps: Sequence[Step], description: str | None, limit_s: float, default_out: Path | None
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
