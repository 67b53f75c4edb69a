"""Run the steps of the first hour on a GPU, one after another, and keep the figures of each.

python scripts/first_gpu.py OUT                            all steps, 27 minutes on one GPU
python scripts/first_gpu.py OUT --steps kernels,train      some of them
python scripts/first_gpu.py OUT --limit-s 570              what fits into ten minutes
python scripts/first_gpu.py REHEARSAL --small              small sizes, minutes on a CPU

OUT/<step>.json has the figures of a step and OUT/<step>.log its output. A step that succeeded is
not run again: the same command continues where a shorter or a killed one ended. The exit code is 0
if all steps succeeded, now or before.
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path
from typing import Any

from dlrm_sharded.errors import ConfigError
from first_hour.runner import Runner, Step, closing_table
from first_hour.worker import worker_command

LIMIT_S = 1620.0

STEPS = (
    Step("environment", limit_s=60, least_s=20),
    Step("kernels", limit_s=120, least_s=30),
    Step("train", limit_s=180, least_s=60),
    Step("collect", limit_s=480, least_s=120),
    Step("mlperf", limit_s=240, least_s=90),
    Step("ranks", limit_s=180, least_s=60),
    Step("fit", limit_s=60, least_s=30, needs=("costs.parquet", "costs.parquet.partial")),
    Step("measured", limit_s=180, least_s=60, needs=("calibration/*.safetensors",)),
    Step("loop", limit_s=120, least_s=60),
)
"""The steps in order. The limits sum to `LIMIT_S`."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [step.name for step in STEPS]
    parser.add_argument("out", type=Path, help="folder of the figures; a new one, or an earlier")
    parser.add_argument("--steps", default=",".join(names), help="names with commas [%(default)s]")
    parser.add_argument("--small", action="store_true", help="rehearse with small sizes")
    parser.add_argument(
        "--limit-s", type=float, default=LIMIT_S, help="time of this call, s [%(default)s]"
    )
    options = parser.parse_args()
    chosen = options.steps.split(",")
    if unknown := set(chosen) - set(names):
        parser.error(f"unknown steps {', '.join(sorted(unknown))}; known: {', '.join(names)}")
    signal.signal(signal.SIGTERM, _end)
    out = options.out.resolve()
    try:
        runner = Runner(
            out,
            command=lambda step, seconds: worker_command(step.name, out, seconds, options.small),
            settings={"small": options.small},
        )
    except ConfigError as error:
        parser.error(str(error))
    outcomes = runner.run([step for step in STEPS if step.name in chosen], options.limit_s)
    print(f"\n{closing_table(outcomes)}\n\nfigures: {out}")
    return 0 if all(outcome.status == "ok" for outcome in outcomes) else 1


def _end(number: int, frame: Any) -> None:
    """End this process as an exception does, so that its step ends too."""
    sys.exit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
