"""Vectors that ranks look up and exchange: one for each feature of a sample, or for each id."""

import dataclasses

import numpy as np
import pytest

from dlrm_sharded.calibration.priors import learned_cost_model
from dlrm_sharded.cost.communication import HARDLY_ANY, STEP_EXCHANGES
from dlrm_sharded.cost.exchange_terms import Hosts
from dlrm_sharded.cost.shapes import PieceCosts
from dlrm_sharded.cost.workload import FLOAT_BYTES, ID_BYTES, Workload, workload_of_plan
from dlrm_sharded.hardware.context import RunContext
from dlrm_sharded.plans.layouts import ColumnShards, Replicas, RowBlocks
from dlrm_sharded.plans.plan import Shard, ShardingPlan
from dlrm_sharded.plans.plan_cost import BWD_COMM
from dlrm_sharded.plans.tables import NUM_REUSE_BINS, Table
from dlrm_sharded.plans.task import ShardingTask, Topology
from tests.unit.search.synthetic import model_of

ONCE = (1.0, *[0.0] * (NUM_REUSE_BINS - 1))
COMPUTE = learned_cost_model(RunContext("cpu")).compute
BATCH_SIZE, NUM_RANKS = 1000, 4
POOLED = Table("pooled", 4_000, 32, 50.0, ONCE)
SHARED = dataclasses.replace(POOLED, name="shared", num_features=3)
SEQUENCE = dataclasses.replace(POOLED, name="sequence", pooled=False)


def workload(*shards: Shard, tables: tuple[Table, ...]) -> Workload:
    task = ShardingTask(tables, Topology(NUM_RANKS, memory_bytes=2**30), BATCH_SIZE)
    return workload_of_plan(ShardingPlan(NUM_RANKS, shards), task)


@pytest.mark.parametrize(("table", "per_sample"), [(POOLED, 1), (SHARED, 3), (SEQUENCE, 50)])
def test_a_rank_sends_the_vectors_of_each_feature_or_of_each_id(table, per_sample):
    widths = [0, 24, 8, 0] if table.pooled else [0, 32, 0, 0]
    pieces = [(rank, width) for rank, width in enumerate(widths) if width]
    found = workload(*ColumnShards.shards(table, pieces), tables=(table,))
    vectors = found.exchange(for_ids=False)
    column_bytes = FLOAT_BYTES * BATCH_SIZE * per_sample / NUM_RANKS
    assert vectors.volume.tolist() == pytest.approx([width * column_bytes for width in widths])
    lengths = max(table.num_features, 1)
    ids = found.exchange(for_ids=True).volume
    of_table = ID_BYTES * BATCH_SIZE * (50 + lengths) / NUM_RANKS
    assert ids.tolist() == pytest.approx([of_table * (width > 0) for width in widths])


@pytest.mark.parametrize("table", [POOLED, SHARED, SEQUENCE], ids=lambda table: table.name)
@pytest.mark.parametrize("in_rows", [False, True])
def test_pieces_are_costed_as_plans_are(table, in_rows):
    task = ShardingTask((table,), Topology(NUM_RANKS, memory_bytes=2**30), BATCH_SIZE)
    pieces = PieceCosts(task, COMPUTE)
    if in_rows:
        blocks = pieces.row_blocks(NUM_RANKS)
        plan = workload(*RowBlocks(range(NUM_RANKS)).shards(table), tables=(table,))
        piece, reduced = blocks.block, blocks.reduce_volume[0]
    else:
        piece = pieces.columns(np.array([0]), np.array([table.embedding_dim]))
        plan, reduced = workload(Shard.whole(table, 0), tables=(table,)), 0.0
    exchange = plan.exchange(for_ids=False)
    assert exchange.volume[0] == pytest.approx(piece.volume[0])
    assert sum(reduce.volume[0] for reduce in exchange.reduces) == pytest.approx(reduced)


def counted(
    plan: ShardingPlan, tables: dict[str, Table], batches: list[dict[str, list[np.ndarray]]]
) -> tuple[np.ndarray, np.ndarray]:
    """Bytes that each rank sends to another one in the mean, in vectors of its shards and reduced.

    Args:
        batches: rows that each sample of every rank looks up in each table.
    """
    size = plan.world_size
    sent, reduced = np.zeros((size, size)), np.zeros((size, size))
    for home, samples in enumerate(batches):
        for shard in (s for s in plan.shards if not s.replicated):
            num_bytes, table = FLOAT_BYTES * shard.num_cols, tables[shard.table]
            for rows in samples[shard.table]:
                held = [row for row in rows if shard.rows[0] <= row < shard.rows[1]]
                in_rows = shard.num_rows < table.num_embeddings
                if not table.pooled:
                    sent[shard.rank, home] += len(held) * num_bytes
                else:  # a partial sum of every bag, also where it is empty
                    (reduced if in_rows else sent)[shard.rank, home] += num_bytes
    return sent.mean(axis=1), reduced.mean(axis=1)


@pytest.mark.parametrize("seed", range(3))
def test_volumes_are_those_that_counting_every_vector_gives(seed):
    """Sequences and bags whole, in columns, in row blocks and replicated, each id in turn."""
    rng = np.random.default_rng(seed)
    made = [
        Table(f"t{i}", 12, 8, 3.0, ONCE, pooled=i % 2 == 0, module="ab"[i % 2]) for i in range(8)
    ]
    layouts = (
        lambda t: [Shard.whole(t, int(rng.integers(NUM_RANKS)))],
        lambda t: ColumnShards.shards(
            t, [(int(rng.integers(NUM_RANKS)), 4 if t.pooled else 8) for _ in range(1 + t.pooled)]
        ),
        RowBlocks(range(NUM_RANKS)).shards,
        Replicas(NUM_RANKS).shards,
    )
    plan = ShardingPlan(NUM_RANKS, tuple(s for i, t in enumerate(made) for s in layouts[i // 2](t)))
    # every row as often as any other, as a model of the mean has it
    batches = [
        {t.name: list(rng.permutation(np.repeat(np.arange(12), 6)).reshape(-1, 3)) for t in made}
        for _ in range(NUM_RANKS)
    ]
    batch_size = NUM_RANKS * len(batches[0]["t0"])
    task = ShardingTask(tuple(made), Topology(NUM_RANKS, 2**30), batch_size)
    exchange = workload_of_plan(plan, task).exchange(for_ids=False)
    sent, reduced = counted(plan, {t.name: t for t in made}, batches)
    assert exchange.volume.tolist() == pytest.approx(sent.tolist())
    assert sum(r.volume for r in exchange.reduces).tolist() == pytest.approx(reduced.tolist())


MODULES = tuple(dataclasses.replace(POOLED, name=name, module=name) for name in "abc")
LAYOUTS = {
    "columns": lambda table: [Shard.whole(table, int(table.name == "c"))],
    "rows": RowBlocks(range(NUM_RANKS)).shards,
    "replicas": Replicas(NUM_RANKS).shards,
}


@pytest.mark.parametrize(
    ("kinds", "lookups"),
    [
        (["columns"] * 3, [2, 1, 0, 0]),
        (["rows"] * 3, [3] * 4),
        (["replicas", "replicas", "rows"], [3] * 4),
    ],
    ids=["columns", "rows", "replicas"],
)
def test_each_module_launches_its_own_lookups_and_exchanges(kinds, lookups):
    """Together with modules that carry nothing, the times are those of one module."""
    layouts = zip(kinds, MODULES, strict=True)
    shards = [shard for name, table in layouts for shard in LAYOUTS[name](table)]
    apart = workload(*shards, tables=MODULES)
    joined = workload(*shards, tables=tuple(dataclasses.replace(t, module="") for t in MODULES))
    assert apart.num_lookups().tolist() == lookups
    model, hosts = model_of("plain").communication, Hosts(NUM_RANKS, NUM_RANKS)
    number = np.zeros(1), np.full(1, HARDLY_ANY)
    for kind in STEP_EXCHANGES:
        apart_ms, joined_ms = (
            model.exchange_ms(kind, of.exchange(for_ids=False), hosts) for of in (apart, joined)
        )
        fixed_ms = {
            "columns": model.launch_ms(kind, hosts),
            "rows": float(model.reduce_ms(kind, *number, hosts)[0]),
            "replicas": float(model.all_reduce_ms(number[1], hosts)[0]) * (kind == BWD_COMM),
        }
        expected = sum((kinds.count(name) - 1) * fixed_ms[name] for name in set(kinds))
        assert (apart_ms - joined_ms).tolist() == pytest.approx([expected] * NUM_RANKS)


def test_row_blocks_of_sequences_have_an_all_to_all_beside_that_of_whole_ones():
    second = dataclasses.replace(SEQUENCE, name="second")
    shards = Shard.whole(second, 0), *RowBlocks(range(NUM_RANKS)).shards(SEQUENCE)
    both = workload(*shards, tables=(SEQUENCE, second, POOLED)[:2])
    assert both.exchange(for_ids=False).num_launches == 2
