"""Run the steps of the first hour on a GPU, one after another, and keep the figures of each.

python scripts/first_gpu.py OUT                            all steps, 27 minutes on one GPU
python scripts/first_gpu.py OUT --steps kernels,train      some of them
python scripts/first_gpu.py OUT --limit-s 570              what fits into ten minutes
python scripts/first_gpu.py REHEARSAL --small              small sizes, minutes on a CPU

OUT/<step>.json has the figures of a step and OUT/<step>.log its output; OUT/results.tar.gz has all
of them. What succeeded is not run again, neither a step nor a case of one: the same command
continues where a shorter or a killed one ended. The exit code is 0 if all steps succeeded, now or
before.
"""

from __future__ import annotations

import sys

from studies.command_line import run_steps
from studies.study import Study

LIMIT_S = 1620.0
"""Time of a call. The limits of the steps sum to more: a step is killed then, as it hangs."""

LIBRARIES = ("torch", "fbgemm_gpu", "torchrec")
"""Their first import reads gigabytes from a cold disk, which no step is to be measured with."""

MEASURED = (
    "measured --reference torchrec --sharders neuroshard torchrec size_lookup --link-gb-per-s 450"
)
"""Links between GPUs have the speed of an H100 or H200, which one GPU cannot measure."""

STEPS = (
    Study("environment", limit_s=120, least_s=20),
    Study("kernels", limit_s=120, least_s=30),
    Study("train", limit_s=330, least_s=60),
    Study("collect", limit_s=480, least_s=120),
    Study("mlperf", limit_s=240, least_s=90),
    Study("ranks", limit_s=180, least_s=60),
    Study("fit", limit_s=60, least_s=30, needs=("costs.parquet", "costs.parquet.partial")),
    Study(
        "measured",
        limit_s=180,
        least_s=60,
        needs=("calibration/*.safetensors",),
        commands=(f"{MEASURED} --tasks 6 --rounds 2",),
        small=(f"{MEASURED} --tasks 2 --rounds 1 --iterations 3 --share 64",),
        case_s=25,
    ),
    Study("loop", limit_s=120, least_s=60),
    Study(
        "host",
        limit_s=180,
        least_s=60,
        commands=("host --ranks 1 --batch-sizes 64",),
        small=("host --ranks 1 --batch-sizes 8 --steps 2 --rounds 1 --compile-mode none",),
        case_s=60,
    ),
    Study(
        "table_order",
        limit_s=120,
        least_s=45,
        commands=("table_order --tasks 6",),
        small=("table_order --tasks 2 --tables 3 --orders 2 --rounds 1 --iterations 3",),
        case_s=15,
    ),
)
"""The steps in order."""


def main() -> int:
    return run_steps(
        STEPS, package="first_hour", description=__doc__, limit_s=LIMIT_S, preload=LIBRARIES
    )


if __name__ == "__main__":
    sys.exit(main())
