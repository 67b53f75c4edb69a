"""Plans are as large as steps on the device are, and fit its memory."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dlrm_sharded.calibration.plan_sizes import (
    CPU_SIZES,
    GPU_SIZES,
    POOLED_COPIES,
    default_sizes,
    plan_sizes,
)
from dlrm_sharded.files.errors import ConfigError
from dlrm_sharded.plans.task import GIB
from dlrm_sharded.ranks.distributed import Rank

NOTHING: dict[str, Any] = {"batch_sizes": None, "table_gib": None, "ids_per_step": None}
CPU = Rank(0, 4, 0, 4, torch.device("cpu"))
GPU = Rank(0, 4, 0, 4, torch.device("cuda", 0))


@pytest.fixture
def free_gib(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let the GPUs of a job have so much memory free."""

    def set_free(mine: float, *others: float) -> None:
        def gather(found: list[Any], value: int) -> None:
            found[:] = [value, *(int(other * GIB) for other in others)]

        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (int(mine * GIB), 0))
        monkeypatch.setattr(dist, "all_gather_object", gather)

    return set_free


def test_a_cpu_has_small_plans() -> None:
    sizes = plan_sizes(CPU, **NOTHING)
    assert sizes == CPU_SIZES
    assert sizes.batch_sizes == (1024, 2048, 4096, 8192)
    assert sizes.rank_limits("adam").pooled_bytes == math.inf
    assert sizes.rank_limits("rowwise_adagrad").table_bytes == 2 * GIB
    assert sizes.rank_limits("adam").wide_cols == 2048


def test_a_gpu_has_plans_in_which_bandwidth_decides(free_gib: Callable[..., None]) -> None:
    free_gib(79.1, 78.9, 79.0, 79.1)
    sizes = plan_sizes(GPU, **NOTHING)
    assert sizes == dataclasses.replace(GPU_SIZES, pooled_gib=32 / POOLED_COPIES)
    assert sizes.batch_sizes == (8192, 16384, 32768, 65536, 131072)
    assert (sizes.table_gib, sizes.ids_per_step) == (24.0, 8_000_000)


@pytest.mark.parametrize("gpu_gib", [0.7, 6.0, 14.6, 15.5, 22.0, 39.4, 79.1, 139.0])
def test_plans_fit_the_gpu_with_the_least_memory(gpu_gib: float, free_gib: Callable[..., None]):
    free_gib(gpu_gib + 3, gpu_gib, gpu_gib + 5, gpu_gib + 1)
    sizes = plan_sizes(GPU, **NOTHING)
    assert 0 < sizes.table_gib <= 24
    assert sizes.table_gib + POOLED_COPIES * sizes.pooled_gib <= gpu_gib
    assert sizes == default_sizes(world_size=4, gpu_gib=1.01 * gpu_gib), "as when it is resumed"


def test_the_state_of_the_optimizer_is_within_the_memory() -> None:
    of = {name: GPU_SIZES.rank_limits(name) for name in ("sgd", "rowwise_adagrad", "adam")}
    gib = {name: limits.table_bytes / GIB for name, limits in of.items()}
    assert gib == {"sgd": 24, "rowwise_adagrad": 24, "adam": 8}


@pytest.mark.parametrize("world_size", [1, 3, 6, 7, 24, 3000])
@pytest.mark.parametrize("gpu_gib", [None, 79.0], ids=["cpu", "gpu"])
def test_batches_divide_by_the_ranks(world_size: int, gpu_gib: float | None) -> None:
    sizes = default_sizes(world_size=world_size, gpu_gib=gpu_gib).batch_sizes
    assert sizes == tuple(sorted(set(sizes)))
    assert all(size > 0 and size % world_size == 0 for size in sizes)
    ceiling = (CPU_SIZES if gpu_gib is None else GPU_SIZES).batch_sizes[-1]
    assert ceiling - world_size < sizes[-1] <= ceiling


@pytest.mark.parametrize("rank", [CPU, GPU], ids=["cpu", "gpu"])
def test_what_is_given_counts(rank: Rank, free_gib: Callable[..., None]) -> None:
    free_gib(79.0, 79.0, 79.0, 79.0)
    sizes = plan_sizes(rank, batch_sizes=[64, 128], table_gib=40.0, ids_per_step=7)
    assert (sizes.batch_sizes, sizes.table_gib, sizes.ids_per_step) == ((64, 128), 40.0, 7)


def test_tables_that_do_not_fit_a_gpu(free_gib: Callable[..., None]) -> None:
    free_gib(79.0, 70.5, 79.0, 79.0)
    message = r"table_gib is 40, but a GPU has 70.5 GiB free, of which 32 .* at most 38.5, or null"
    with pytest.raises(ConfigError, match=message):
        plan_sizes(GPU, **{**NOTHING, "table_gib": 40.0})
