"""Measuring on the device that it is for, under TorchRec's own kernels and collectives."""

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torchrec.distributed.types

from dlrm_sharded.calibration.collect import collect
from dlrm_sharded.calibration.plan_limits import PlanSizes
from dlrm_sharded.measuring import bench as bench_module
from dlrm_sharded.measuring.measure import MeasureConfig
from dlrm_sharded.measuring.rank_bench import RankBench, draw_ids
from dlrm_sharded.plans.plan import Shard
from dlrm_sharded.plans.plan_cost import STAGES
from dlrm_sharded.plans.tables import Table
from dlrm_sharded.ranks.distributed import Rank
from tests.distributed.test_measure import measure_plan
from tests.gpu.devices import NUM_CPU_RANKS, ON_CPU, ON_GPUS, run_on

SMALL = PlanSizes({"cpu": 0.01, "cuda": 0.01}, {"cpu": 5000, "cuda": 5000}, memory_share=0.01)


def collect_in_groups(rank: Rank) -> list[dict[str, Any]]:
    """Measure plans for some seconds, on some of the ranks and on all."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a device mesh of some ranks waits for all others, under NCCL")

    torchrec.distributed.types.init_device_mesh = refuse
    rows: list[dict[str, Any]] = []
    collect(
        rank,
        lambda sample, _: rows.append(sample.to_row()),
        optimizer="rowwise_adagrad",
        sizes=SMALL,
        budget_s=15.0,
        batch_sizes=[64 * rank.world_size],
    )
    dist.barrier()
    return rows


@pytest.mark.parametrize("device", [ON_CPU, ON_GPUS])
def test_collects_in_groups_of_the_ranks(device):
    rows = run_on(device, collect_in_groups)
    if device == "cpu":
        assert {row["world_size"] for row in rows[:6]} >= {NUM_CPU_RANKS, 2}
    assert len(rows) >= 1
    for row in rows:
        assert len(row["per_rank"]) == row["world_size"]
        for rank in row["per_rank"]:
            assert set(rank) == {"input_dist_ms", *(f"{stage}_ms" for stage in STAGES)}
            # without a column on a rank, or exchanged with nobody, a stage may launch nothing
            assert min(rank.values()) >= 0
            if row["kind"] == "computation":
                assert rank["fwd_compute_ms"] > 0
                assert rank["bwd_compute_ms"] > 0


@pytest.mark.parametrize("device", [ON_GPUS])
def test_measuring_leaves_weights_and_states(device):
    """As it does on CPUs in `tests/distributed`."""
    result = run_on(device, measure_plan)
    assert result["num_states"] > 4
    assert not any(result["changed"]), result["changed"]
    assert result["agree"]
    assert min(min(cost.values()) for cost in result["per_rank"]) > 0
    assert set(result["launch_ms"]) == set(STAGES)


def measure_beside_a_reference(rank: Rank) -> dict[str, Any]:
    """Measure lookups once, and many of them in a row between two looks at a clock."""
    on_gpu = rank.device.type == "cuda"
    batch_size, num_ids = (65536, 10.0) if on_gpu else (256, 2.0)
    tables = [Table(f"t{i}", 200_000 if on_gpu else 1000, 128, num_ids) for i in range(4)]
    ids = draw_ids(tables, batch_size=batch_size, num_batches=1, seed=0)
    given: list[Any] = []
    found: list[Any] = []
    measure_modules = bench_module.measure_modules

    def spy(modules: Any, config: MeasureConfig, **group: Any) -> Any:
        [module] = modules
        given.append((module.embeddings, module.batches[0]))
        found.append(measure_modules(modules, config, **group))
        return found[0]

    bench_module.measure_modules = spy
    bench = RankBench(
        MeasureConfig(iterations=10, warmup=3, num_batches=1),
        rank.device,
        optimizer="rowwise_adagrad",
        table_bytes=10**9 if on_gpu else 10**7,
    )
    bench.measure([Shard.whole(table, rank=0) for table in tables], ids)
    [(embeddings, batch)] = given
    context = embeddings.create_context()
    received = embeddings.input_dist(context, batch).wait().wait()

    def forward() -> Any:
        return embeddings.compute(context, received)

    gradients = [torch.zeros_like(pooled) for pooled in forward()]

    def step() -> None:
        torch.autograd.backward(forward(), gradients)

    [cost] = found[0].cost.per_rank
    return {
        "measured_ms": [cost.fwd_compute_ms, cost.fwd_compute_ms + cost.bwd_compute_ms],
        "reference_ms": [once_ms(forward), once_ms(step)] if on_gpu else [],
        "launch_ms": dict(found[0].launch_ms),
        "exposed": found[0].exposed,
    }


def once_ms(work: Callable[[], Any], times: int = 20) -> float:
    """Time of work among more of its kind, so that launches are hidden behind what runs."""
    for _ in range(3):
        work()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    for _ in range(times):
        work()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / times


@pytest.mark.parametrize("device", [ON_CPU, ON_GPUS])
def test_measures_what_a_row_of_lookups_takes(device):
    """Kernels of a millisecond, so that the reference has no launches in it either."""
    found = run_on(device, measure_beside_a_reference, num_ranks=1)
    assert min(found["measured_ms"]) > 0
    if device == "cuda":
        ratios = map(operator.truediv, found["measured_ms"], found["reference_ms"])
        assert all(0.5 < ratio < 2 for ratio in ratios)
        assert not found["exposed"]
        assert set(found["launch_ms"]) == set(STAGES)
        assert min(found["launch_ms"].values()) > 0
