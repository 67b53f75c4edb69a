"""What cost models read of a plan: volumes and work, by hand and against exact counts."""

import numpy as np
import pytest

from dlrm_sharded import ShardingTask, validate
from dlrm_sharded.accesses.profiles import with_expected_profile
from dlrm_sharded.accesses.zipf import cached_zipf
from dlrm_sharded.cost.features import CPU_WORK, work_of
from dlrm_sharded.cost.workload import Workload, workload_of_plan
from dlrm_sharded.plans.layouts import Replicas, RowBlocks
from dlrm_sharded.plans.plan import Shard, ShardingPlan
from dlrm_sharded.plans.tables import Table
from tests.unit.synthetic import task_of

BATCH_SIZE = 64
ROUNDING = 1e-12
"""Relative difference of equal numbers, which vector units round differently in other places."""
TABLES = with_expected_profile(
    [Table("a", 1000, 32, 3.0), Table("b", 50, 8, 0.5), Table("c", 10, 16, 2.0)],
    batch_size=BATCH_SIZE,
    exponent=0.9,
)
A, B, C = TABLES


def small_task(
    tables: tuple[Table, ...] = TABLES, world_size: int = 2, ranks_per_host: int | None = None
) -> ShardingTask:
    return task_of(tables, world_size, batch_size=BATCH_SIZE, local_world_size=ranks_per_host)


def workload(*shards: Shard, task: ShardingTask | None = None) -> Workload:
    task = task or small_task()
    plan = ShardingPlan(task.topology.world_size, shards)
    validate(plan, task)
    return workload_of_plan(plan, task)


def work(of: Workload, term: str) -> list[float]:
    return work_of(of)[:, CPU_WORK.terms.index(term)].tolist()


# a whole on rank 0, b on rank 1, c in blocks of 5 rows on both.
MIXED = (Shard.whole(A, 0), *RowBlocks(range(2)).shards(C), Shard.whole(B, 1))


def test_pooled_vectors_by_hand() -> None:
    """A rank sends each other one its columns of that one's 32 samples."""
    exchange = workload(*MIXED).exchange(for_ids=False)
    assert exchange.volume.tolist() == [32 * 32 * 4, 8 * 32 * 4]
    assert exchange.num_shards.tolist() == [1, 1]
    (reduce,) = exchange.reduces
    assert reduce.group_size == 2
    assert reduce.volume.tolist() == [16 * 32 * 4] * 2
    assert reduce.num_shards.tolist() == [1, 1]


def test_ids_by_hand() -> None:
    """A rank gets from each other one the ids of its 32 samples, and a length for each bag."""
    exchange = workload(*MIXED).exchange(for_ids=True)
    assert exchange.volume.tolist() == [(32 * 3.0 + 32) * 4, (32 * 0.5 + 32) * 4]
    assert exchange.num_shards.tolist() == [1, 1]
    # half of c's ids are of each rank's rows; all 32 bags have a length
    (reduce,) = exchange.reduces
    assert reduce.volume.tolist() == [(32 * 2.0 / 2 + 32) * 4] * 2
    assert reduce.num_shards.tolist() == [1, 1]


def test_gradients_of_replicas_by_hand() -> None:
    """All ranks average those of c's 10 rows of 16 columns, and exchange no ids for them."""
    of = workload(Shard.whole(A, 0), *Replicas(2).shards(C), Shard.whole(B, 1))
    assert of.exchange(for_ids=False).replica_bytes == 10 * 16 * 4
    assert of.exchange(for_ids=True).replica_bytes == 0


def test_work_by_hand() -> None:
    of = workload(*MIXED)
    assert of.rank.tolist() == [0, 0, 1, 1]
    assert of.group_size.tolist() == [1, 2, 2, 1]
    assert of.num_lookups().tolist() == [2, 2]
    assert work(of, "shards") == [1, 1, 1, 1]
    assert work(of, "bags") == [0.064] * 4
    assert work(of, "pooled_columns") == pytest.approx([0.128, 0.064, 0.064, 0.032])
    assert work(of, "ids") == pytest.approx([0.192, 0.064, 0.064, 0.032])
    assert work(of, "id_lines") == pytest.approx([0.384, 0.064, 0.064, 0.032])
    assert work(of, "id_columns") == pytest.approx([0.384, 0.064, 0.064, 0.016])
    assert of.by_rank(of.num_ids).tolist() == pytest.approx([256.0, 96.0])
    assert of.unique_bytes().tolist() == pytest.approx((of.num_unique * of.num_cols * 4).tolist())


def test_blocks_on_one_host_of_two_are_a_lookup_of_their_own() -> None:
    task = small_task(world_size=4, ranks_per_host=2)
    blocks = *RowBlocks(range(2, 4)).shards(B), *RowBlocks(range(4)).shards(C)
    shards = (Shard.whole(A, 0), *blocks)
    of = workload(*shards, task=task)
    assert of.group_size.tolist() == [1, *[2] * 2, *[4] * 4]
    assert of.num_lookups().tolist() == [2, 1, 2, 2]
    assert of.num_ids.tolist()[1:3] == pytest.approx([16.0, 16.0])
    vectors = of.exchange(for_ids=False)
    # after their sum within the host, each of its ranks has half of b's 8 columns
    assert vectors.volume.tolist() == [32 * 16 * 4, 0, 4 * 16 * 4, 4 * 16 * 4]
    everywhere, on_host = vectors.reduces
    assert (everywhere.group_size, on_host.group_size) == (4, 2)
    assert everywhere.volume.tolist() == [16 * 16 * 4] * 4
    # each of the host's ranks sends the other one its sums for half of all samples
    assert on_host.volume.tolist() == [0, 0, 8 * 32 * 4, 8 * 32 * 4]
    assert on_host.num_shards.tolist() == [0, 0, 1, 1]
    ids = of.exchange(for_ids=True)
    assert ids.volume.tolist() == [(48 + 16) * 4, 0, (4 + 16) * 4, (4 + 16) * 4]


@pytest.mark.parametrize("exponent", [0.0, 0.6, 0.9, 1.2])
@pytest.mark.parametrize("num_rows", [100, 20_000, 3_000_000])
@pytest.mark.parametrize("num_ids", [2_000, 200_000])
def test_unique_ids_are_what_draws_show(num_ids: int, num_rows: int, exponent: float) -> None:
    zipf = cached_zipf(num_rows, exponent)
    bits = np.random.default_rng(0).integers(0, 2**64, size=num_ids, dtype=np.uint64)
    exact = len(np.unique(zipf.ranks(bits)))
    table = Table("t", num_rows, 8, num_ids / BATCH_SIZE, zipf.expected_reuse_histogram(num_ids))
    of = workload(Shard.whole(table, 0), task=small_task((table,)))
    assert of.num_unique.tolist() == pytest.approx([exact], rel=0.15)
