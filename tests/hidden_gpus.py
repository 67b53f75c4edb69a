"""The GPUs that tests were given, which they hide from themselves and from what they start."""

import os

VARIABLE, GIVEN = "CUDA_VISIBLE_DEVICES", "DLRM_SHARDED_TESTS_GPUS"
ALL = "all"


def hide() -> None:
    """Hide all GPUs; the workers of xdist get to know here which ones there are."""
    os.environ.setdefault(GIVEN, os.environ.get(VARIABLE, ALL))
    os.environ[VARIABLE] = ""


def environment_with_gpus() -> dict[str, str]:
    """Return the environment as it was before they were hidden."""
    given = os.environ.get(GIVEN, ALL)
    shown = {key: value for key, value in os.environ.items() if key != VARIABLE}
    return shown if given == ALL else shown | {VARIABLE: given}
