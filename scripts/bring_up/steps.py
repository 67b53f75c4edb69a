"""The steps that bring up a machine, in order."""

from __future__ import annotations

from studies.study import Study

LIMIT_S = 1740.0
"""Time of a call. It leaves a minute of half an hour for the starts of the steps.

The limits of the steps sum to more: a step is killed then, as it hangs.
"""

CALIBRATED = ("calibration/learned-*.safetensors",)

BENCHMARK = (
    "measured --reference torchrec --sharders neuroshard torchrec size_lookup autoshard "
    "--link-gb-per-s 450"
)

STEPS = (
    Study("tests", limit_s=420, least_s=60),
    Study("hardware", limit_s=60, least_s=20),
    Study("gpu", limit_s=520, least_s=120),
    Study("calibrate", limit_s=210, least_s=60),
    Study("policies", limit_s=200, least_s=60, needs=CALIBRATED),
    Study("sweep", limit_s=270, least_s=60),
    Study(
        "benchmark",
        limit_s=240,
        least_s=60,
        needs=CALIBRATED,
        commands=(f"{BENCHMARK} --tasks 8 --rounds 2",),
        small=(f"{BENCHMARK} --tasks 1 --rounds 1 --iterations 3 --share 64",),
        case_s=25,
    ),
)
"""All steps in order."""

ONLY_ON_GPUS = ("gpu",)

MEASURING = ("hardware", "calibrate", "sweep", "benchmark")
"""Steps whose figures need a machine that does nothing else."""

MAIN_ERROR = "plan, embedding cost"
"""Quantity whose mean error stands for that of the prices."""


def steps_on(device: str) -> tuple[Study, ...]:
    """Return the steps for machines of a type of device, "cpu" or "cuda"."""
    return tuple(step for step in STEPS if device == "cuda" or step.name not in ONLY_ON_GPUS)
