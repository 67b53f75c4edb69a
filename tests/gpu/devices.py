"""The GPUs that tests were given; the same tests run on CPUs, as a rehearsal.

`pytest -m gpu` runs the tests with parameters of `needs_gpus` on 1, 2 or 8 GPUs alike. The same
tests with "cpu" show without a GPU that they run.
"""

import functools
from collections.abc import Callable
from typing import Any

import pytest

from dlrm_sharded.ranks.gpus import visible_gpus
from tests.hidden_gpus import environment_with_gpus
from tests.preloaded.ranks import run_ranks

NUM_CPU_RANKS = 3


@functools.cache
def gpus() -> list[str]:
    """GPUs that the tests were given, which hide them from this process."""
    return visible_gpus(environment_with_gpus())


def needs_gpus(number: int) -> list[pytest.MarkDecorator]:
    """Marks of a test that runs on so many GPUs."""
    devices = "a CUDA device" if number == 1 else f"{number} CUDA devices"
    return [pytest.mark.gpu, pytest.mark.skipif(len(gpus()) < number, reason=f"needs {devices}")]


ON_GPUS = pytest.param("cuda", marks=needs_gpus(1))
ON_CPU = pytest.param("cpu", marks=pytest.mark.slow)
"""A rehearsal of what only tests of GPUs call; `tests/distributed` calls the rest on CPUs."""


def run_on(
    device: str,
    fn: Callable[..., Any],
    *args: Any,
    num_ranks: int | None = None,
    local_world_size: int | None = None,
) -> Any:
    """`run_ranks` on a device; without `num_ranks` one for every GPU, or a few on a CPU."""
    if device == "cpu":
        num_ranks = num_ranks or NUM_CPU_RANKS
        return run_ranks(fn, num_ranks, *args, local_world_size=local_world_size)
    given = gpus()[:num_ranks]
    return run_ranks(fn, len(given), *args, local_world_size=local_world_size, gpus=given)


@functools.cache
def results_on(device: str, fn: Callable[..., Any], num_ranks: int) -> dict[str, Any]:
    """All cases of a function in one start of the ranks, which is not repeated if it fails."""
    try:
        return dict(run_on(device, fn, num_ranks=num_ranks))
    except AssertionError as error:
        return {"error": str(error)}
