"""TorchRec's planner gets the cost model's prices of every shard, or none."""

import dataclasses
from collections import Counter

import numpy as np
import pytest
import torch
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import Topology as TorchRecTopology
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.shard_estimators import EmbeddingStorageEstimator
from torchrec.distributed.planner.types import ShardingOption
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from dlrm_sharded import ConfigError, Shard, SharderContext, ShardingTask, Table
from dlrm_sharded.accesses.profiles import with_profiles
from dlrm_sharded.model.torchrec_adapter import bag_configs
from dlrm_sharded.sharders.baselines.torchrec import calibrated_sharder
from dlrm_sharded.sharders.baselines.torchrec_estimator import CalibratedPerfEstimator
from tests.unit.made_up import in_turns, tables_of, task_of, with_topology
from tests.unit.search.made_up import model_of

MODEL = model_of("shipped")
TABLES = tables_of(*((20_000 + 1000 * i, 32, 5.0 + i) for i in range(8)))
TASK = task_of(TABLES, 4, 2**30, 4096)
ON_GPUS = with_topology(TASK, compute_device="cuda", local_world_size=2)
KINDS = {
    *("table_wise", "column_wise", "table_column_wise"),
    *("row_wise", "table_row_wise", "data_parallel"),
}


def options_of(
    task: ShardingTask, estimator: CalibratedPerfEstimator | None = None
) -> dict[tuple[str, str], list[ShardingOption]]:
    """All options that TorchRec offers for the task's tables, by table and type."""
    ranks = task.topology
    topology = TorchRecTopology(
        world_size=ranks.world_size,
        local_world_size=ranks.ranks_per_host,
        compute_device=ranks.compute_device,
    )
    enumerator = EmbeddingEnumerator(
        topology=topology,
        batch_size=task.batch_size // ranks.world_size,
        estimator=[
            estimator or CalibratedPerfEstimator(MODEL.price(task)),
            EmbeddingStorageEstimator(topology=topology),
        ],
    )
    collection = EmbeddingBagCollection(bag_configs(task.tables), device=torch.device("meta"))
    options: dict[tuple[str, str], list[ShardingOption]] = {}
    for option in enumerator.enumerate(collection, [EmbeddingBagCollectionSharder()]):
        options.setdefault((option.name, option.sharding_type), []).append(option)
    return options


def fused(options: list[ShardingOption]) -> ShardingOption:
    (option,) = [option for option in options if option.compute_kernel == "fused"]
    return option


def test_the_sum_of_a_ranks_shards_is_its_computation() -> None:
    """But for launches, under a plan that reads about as much on every rank."""
    options = options_of(TASK)
    plan = in_turns(TASK)
    work: Counter[int] = Counter()
    for shard in plan.shards:
        (piece,) = fused(options[shard.table, "table_wise"]).shards
        work[shard.rank] += piece.perf.fwd_compute + piece.perf.bwd_compute

    predicted = MODEL.predict(plan, with_profiles(TASK))

    launch_ms = float(MODEL.compute.launch_ms(np.ones(1)).sum())
    for rank, cost in enumerate(predicted.per_rank):
        computed_ms = cost.fwd_compute_ms + cost.bwd_compute_ms - launch_ms
        assert work[rank] == pytest.approx(computed_ms, rel=0.05)


def test_bytes_are_priced_at_what_they_add_to_the_busiest_rank() -> None:
    options = options_of(TASK)
    extra = Table("extra", 20_000, 32, 5.0)
    task = dataclasses.replace(TASK, tables=(*TABLES, extra))
    even = in_turns(TASK)
    more = dataclasses.replace(even, shards=(*even.shards, Shard.whole(extra, 2)))
    before = MODEL.predict(even, TASK).per_rank[2]
    after = MODEL.predict(more, task).per_rank[2]

    (piece,) = fused(options["t0", "table_wise"]).shards  # as wide as the extra table

    assert piece.perf.fwd_comms == pytest.approx(after.fwd_comm_ms - before.fwd_comm_ms, rel=1e-3)
    assert piece.perf.bwd_comms == pytest.approx(after.bwd_comm_ms - before.bwd_comm_ms, rel=1e-3)


def test_only_what_trains_in_a_plan_has_a_price() -> None:
    priced = {
        kind: {
            option.compute_kernel
            for option in options
            if all(np.isfinite(shard.perf.total) for shard in option.shards)
        }
        for (_, kind), options in options_of(ON_GPUS).items()
    }
    assert set(priced) >= KINDS
    never = set(priced) - KINDS | {"data_parallel"}
    assert {kind: priced[kind] for kind in never} == {kind: set() for kind in never}
    assert all(priced[kind] == {"fused"} for kind in KINDS - never)


def test_blocks_of_rows_share_the_computation_and_pay_for_their_reduction() -> None:
    options = options_of(ON_GPUS)
    (whole,) = fused(options["t0", "table_wise"]).shards
    blocks = fused(options["t0", "row_wise"]).shards

    assert len(blocks) == 4
    for block in blocks:
        # each block has a bag for every sample, however few of the ids are its own
        assert whole.perf.fwd_compute / 4 < block.perf.fwd_compute < whole.perf.fwd_compute
        assert min(block.perf.fwd_comms, block.perf.bwd_comms) > 0


def test_empty_blocks_cost_nothing() -> None:
    """5 rows on 4 ranks are blocks of 2, 2, 1 and 0 rows."""
    task = dataclasses.replace(ON_GPUS, tables=(Table("few", 5, 32, 3.0),))
    *blocks, empty = fused(options_of(task)["few", "row_wise"]).shards
    assert empty.size[0] == 0
    assert empty.perf.total == 0
    assert all(block.perf.total > 0 for block in blocks)


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        (TABLES[1:], "has no table 't0'"),
        (TASK.with_values(num_embeddings={"t0": 7}).tables, r"\(20000, 32\) in the m"),
    ],
    ids=["missing", "other_shape"],
)
def test_the_task_has_the_tables_of_the_model(tables: tuple[Table, ...], message: str) -> None:
    estimator = CalibratedPerfEstimator(MODEL.price(dataclasses.replace(TASK, tables=tables)))
    with pytest.raises(ConfigError, match=message):
        options_of(TASK, estimator)


def test_the_sharder_needs_prices() -> None:
    with pytest.raises(ConfigError, match="cost_model=learned"):
        calibrated_sharder(SharderContext())
