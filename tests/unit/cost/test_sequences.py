"""Updates of sequences on CPUs, which have a cost of their own, not that of bags of one id."""

import dataclasses

import numpy as np
import pytest

from dlrm_sharded.calibration.priors import learned_cost_model
from dlrm_sharded.cost.compute import ComputeModel
from dlrm_sharded.cost.gpu_lookups import gpu_compute
from dlrm_sharded.cost.sequences import SequenceCosts
from dlrm_sharded.cost.workload import Workload, workload_of_plan
from dlrm_sharded.hardware.context import RunContext
from dlrm_sharded.hardware.gpus.gpu_specs import gpu_specs
from dlrm_sharded.plans.plan import Shard, ShardingPlan
from dlrm_sharded.plans.tables import NUM_REUSE_BINS, Table
from dlrm_sharded.plans.task import ShardingTask, Topology

ONCE = (1.0, *[0.0] * (NUM_REUSE_BINS - 1))
COSTS = SequenceCosts(line_ms=0.5, far_row_ms=4.0, half_rows=8.0)
PRIOR = learned_cost_model(RunContext("cpu"))
COMPUTE = dataclasses.replace(PRIOR.compute, crowding=COSTS)
BATCH_SIZE = 1000


def workload(*tables: Table, num_ranks: int = 1) -> Workload:
    task = ShardingTask(tables, Topology(num_ranks, memory_bytes=2**40), BATCH_SIZE)
    shards = tuple(Shard.whole(table, 0) for table in tables)
    return workload_of_plan(ShardingPlan(num_ranks, shards), task)


def sequences(*ids: float, pooled: bool = False) -> tuple[Table, ...]:
    """Return tables of 32 columns whose ids are all different, so many a sample."""
    return tuple(
        Table(f"s{i}", 10**7, 32, of, ONCE, pooled=pooled, module="" if pooled else "s")
        for i, of in enumerate(ids)
    )


def times(compute: ComputeModel, of: Workload) -> np.ndarray:
    return compute.times_ms(of.by_rank(compute.vectors(of)), of.num_lookups())


def test_rows_take_longer_with_more_of_them() -> None:
    """8,000 rows of two cache lines: each costs 3 lines, and half of them are far."""
    alone, together = workload(*sequences(8.0)), workload(*sequences(8.0, 16.0))
    bare = dataclasses.replace(COMPUTE, crowding=SequenceCosts())
    for of, rows in ((alone, 8.0), (together, 24.0)):
        forward, backward = (times(COMPUTE, of) - times(bare, of))[0]
        assert forward == 0.0
        far = rows**2 / (rows**2 + 8.0**2)
        assert backward == pytest.approx(rows * (3 * 0.5 + far * 4.0))


def test_parts_and_shards_of_a_rank_sum_to_its_time() -> None:
    of = workload(*sequences(3.0, 10.0), *[Table("bag", 10**5, 64, 20.0, ONCE)], num_ranks=2)
    expected = times(COMPUTE, of)
    of_shards, of_launches = COMPUTE.parts_ms(of)
    parts = [of.by_rank(each) for each in of_shards] + of_launches
    np.testing.assert_allclose(parts.sum(axis=2).T, expected)
    vectors = COMPUTE.vectors(of)
    crowd = np.repeat(vectors.sum(axis=0)[None], len(vectors), axis=0)
    launches = COMPUTE.launch_ms(of.num_lookups())[0]
    assert COMPUTE.work_ms(vectors, crowd).sum(axis=0) + launches == pytest.approx(expected[0])
    twice = COMPUTE.scaled(
        1.0, np.where(np.arange(COMPUTE.num_parts) == COMPUTE.num_parts - 2, 2.0, 1.0)
    )
    assert twice.crowding == dataclasses.replace(COSTS, line_ms=1.0, far_row_ms=8.0)


def test_bags_have_none() -> None:
    bags = workload(*sequences(8.0, 16.0, pooled=True))
    bare = dataclasses.replace(COMPUTE, crowding=SequenceCosts())
    assert (times(COMPUTE, bags) == times(bare, bags)).all()
    assert not COMPUTE.parts_ms(bags)[0][:, :, -2].any()


def test_sequences_on_gpus_are_as_bags_of_one_id_that_share_a_warp() -> None:
    compute = gpu_compute(gpu_specs()["h100_sxm"], "rowwise_adagrad")
    [sequence] = sequences(20.0)
    ids_as_samples = dataclasses.replace(sequence, pooled=True, pooling_factor=1.0)
    task = ShardingTask((ids_as_samples,), Topology(1, memory_bytes=2**40), 20 * BATCH_SIZE)
    bags = workload_of_plan(ShardingPlan(1, (Shard.whole(ids_as_samples, 0),)), task)
    [[forward, backward]], [[of_bags, backward_of_bags]] = (
        times(compute, of) for of in (workload(sequence), bags)
    )
    assert backward == pytest.approx(backward_of_bags)
    assert forward < of_bags
