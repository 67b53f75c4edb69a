"""Odd tasks: few tables on many ranks, wide beside busy ones, little memory.

`python scripts/benchmark.py odd` compares more sharders on more of them.
"""

import functools
import itertools

import pytest

from dlrm_sharded import RunContext, ShardingPlan, ShardingTask, make_sharder, validate
from dlrm_sharded.accesses.profiles import with_profiles
from dlrm_sharded.cost.base import PricedTask
from dlrm_sharded.cost.bound import lower_bound_ms
from dlrm_sharded.cost.learned import LearnedCostModel, learned_cost_model
from dlrm_sharded.datasets.odd_tasks import FIRST_MIXED, odd_task
from dlrm_sharded.datasets.task_sets import TASK_SETS
from dlrm_sharded.files.errors import ShardingError
from dlrm_sharded.plans.layouts import ColumnShards, Replicas
from dlrm_sharded.plans.plan import Shard
from tests.unit.made_up import tables_of, task_of

SAME = 1.005
"""Ratio up to which costs count as equal."""

FIRST_SEED, NUM_TASKS, MOST_PIECES = 20_000, 30, 60
"""Seeds of the generated tasks, and the largest product of tables and ranks among them."""

OTHERS = ("random", "size", "dim", "lookup", "size_lookup", "embark", "hugectr", "torchrec")


@functools.cache
def model_for(device: str) -> LearnedCostModel:
    return learned_cost_model(RunContext(device=device))


def priced_task(task: ShardingTask) -> PricedTask:
    return model_for(task.topology.compute_device).price(task)


def cost_ms(sharder: str, priced: PricedTask) -> float | None:
    """Return the cost of a sharder's plan, None if it has none."""
    model = model_for(priced.task.topology.compute_device)
    unlimited = {"time_budget_s": None} if sharder == "neuroshard" else {}
    try:
        plan = make_sharder(sharder, model, **unlimited).shard(priced.task)
        validate(plan, priced.task)
    except ShardingError:
        return None
    return priced.predict(plan).cost_ms


FEW_TABLES = {
    "one_table-w16": task_of(tables_of((257, 8, 50.0)), 16, 51_400, 1024, local_world_size=8),
    "two_tables-w12": task_of(
        tables_of((13_358, 256, 3.7), (61, 64, 3.7)),
        *(12, 114_118_400, 98_304),
        device="cuda",
        local_world_size=3,
    ),
    "two_tables-w8": task_of(
        tables_of((4624, 4, 1.0), (7, 512, 2000.0)),
        *(8, 1_104_000, 8192),
        device="cuda",
        local_world_size=4,
    ),
}


@pytest.mark.parametrize("name", FEW_TABLES)
def test_all_tables_are_replicated_where_that_saves_the_exchanges(name: str) -> None:
    """Each replica alone costs more than it saves, as the other tables still exchange vectors."""
    priced = priced_task(FEW_TABLES[name])
    ranks = priced.task.topology.world_size
    shards = [shard for table in priced.task.tables for shard in Replicas(ranks).shards(table)]
    replicas = ShardingPlan(ranks, tuple(shards))
    validate(replicas, priced.task)

    found_ms = cost_ms("neuroshard", priced)

    assert found_ms is not None
    assert found_ms <= SAME * priced.predict(replicas).cost_ms


def test_a_table_that_fills_a_rank_is_replicated_among_many() -> None:
    """Its replica saves nothing in the mean over ranks, but no other layout divides its ids."""
    priced = priced_task(odd_task(60_012))
    found_ms, others_ms = (cost_ms(sharder, priced) for sharder in ("neuroshard", "embark"))
    assert found_ms is not None
    assert others_ms is not None
    assert found_ms <= SAME * others_ms


@pytest.mark.parametrize(
    ("seed", "sharder"),
    [
        (5106, "autoshard"),
        (5107, "hugectr"),
        (5137, "hugectr"),
        (6420, "autoshard_portfolio"),
        (5266, "autoshard_portfolio"),
        (5475, "autoshard"),
        (5349, "torchrec_calibrated"),
        (7156, "embark"),
        (8112, "dreamshard"),
        (7118, "autoshard_portfolio"),
        (8200, "autoshard_portfolio"),
        (8587, "embark"),
        (7194, "torchrec_blind"),
        (5309, "torchrec_calibrated"),
        (9258, "torchrec_blind"),
        (11109, "embark"),
        (11566, "hugectr"),
        (12023, "torchrec_calibrated"),
        (15074, "autoshard_portfolio"),
        (16069, "dreamshard_portfolio"),
        (18077, "hugectr"),
        (18215, "autoshard"),
    ],
    ids=[
        "columns_spread_evenly",
        "blocks_of_59_tables_on_13_ranks",
        "nearly_full_ranks",
        "coarse_columns_before_fine_ones",
        "replicas_that_pay_by_less_than_their_error",
        "columns_of_all_widths",
        "last_blocks_with_fewer_rows",
        "no_wide_replicas",
        "the_cheapest_packing",
        "uneven_parts_beside_whole_tables",
        "narrow_steps_in_small_gaps",
        "starts_of_41_tables_on_4_ranks",
        "slices_in_place_of_all_blocks",
        "slices_on_a_cpu",
        "slices_of_parts_on_a_cpu",
        "room_for_row_blocks_over_all_ranks",
        "a_replica_on_31_nearly_equal_ranks",
        "slices_beside_a_table_that_fills_small_ranks",
        "a_table_for_a_few_columns_of_another",
        "smaller_row_blocks_for_room",
        "replicas_of_what_has_too_few_rows_for_blocks",
        "row_blocks_of_the_largest_table_alone",
    ],
)
def test_plans_that_only_others_found_once(seed: int, sharder: str) -> None:
    priced = priced_task(odd_task(seed))
    found_ms, others_ms = (cost_ms(name, priced) for name in ("neuroshard", sharder))
    assert found_ms is not None
    assert others_ms is not None
    assert found_ms <= SAME * others_ms


def test_columns_of_two_tables_beside_replicas_of_eight() -> None:
    """Row blocks of the two save the exchange of vectors, and still cost more than halves."""
    priced = priced_task(with_profiles(TASK_SETS["paper"](0)[99].task))
    ranks = priced.task.topology.world_size
    assert (ranks, len(priced.task.tables)) == (4, 10)
    cuts = {"t126_006": (0, 1), "t704_007": (2, 3)}
    shards: list[Shard] = []
    for table in priced.task.tables:
        halves = [(rank, 8) for rank in cuts.get(table.name, ())]
        columns = ColumnShards.shards(table, halves)
        shards += columns or Replicas(ranks).shards(table)
    plan = ShardingPlan(ranks, tuple(shards))
    validate(plan, priced.task)

    found_ms = cost_ms("neuroshard", priced)

    assert found_ms is not None
    assert found_ms <= SAME * priced.predict(plan).cost_ms


WIDE_AND_BUSY = {
    "two_tables-w3": task_of(
        tables_of((24_186, 8, 2000.0), (537_294, 2048, 1.0)),
        *(3, 146_742_880_000, 192),
        device="cuda",
    ),
    "tight-w4": task_of(
        tables_of(
            *((47, 8, 1.0), (1252, 64, 2000.0), (1_179_123, 8, 3.7), (260, 4, 50.0)),
            *((2, 2048, 3.7), (5291, 8, 0.001), (40_454, 2048, 1.0)),
        ),
        *(4, 120_133_967, 4096),
        device="cuda",
    ),
    "rows_beside_columns-w14": odd_task(10_134),
}


@pytest.mark.parametrize("name", WIDE_AND_BUSY)
def test_wide_tables_beside_busy_ones(name: str) -> None:
    """The widest shard of a GPU slows down all its lookups; TorchRec cuts shards of 32 columns."""
    priced = priced_task(WIDE_AND_BUSY[name])
    plan = make_sharder("neuroshard", model_for("cuda"), time_budget_s=None).shard(priced.task)
    validate(plan, priced.task)
    torchrec_ms = cost_ms("torchrec", priced)
    assert torchrec_ms is not None
    assert priced.predict(plan).cost_ms <= SAME * torchrec_ms


def small_odd_tasks() -> dict[int, ShardingTask]:
    tasks = ((seed, odd_task(seed)) for seed in itertools.count(FIRST_SEED))
    small = (
        (seed, task)
        for seed, task in tasks
        if len(task.tables) * task.topology.world_size <= MOST_PIECES
    )
    return dict(itertools.islice(small, NUM_TASKS))


def test_tasks_are_odd_and_repeatable() -> None:
    tasks = [odd_task(seed) for seed in range(200)]
    assert tasks[7] == odd_task(7) != tasks[8]
    assert {len(task.tables) for task in tasks} >= {1, 2, 3}
    ranks = [task.topology.world_size for task in tasks]
    assert min(ranks) == 1
    assert 24 < max(ranks) <= 32
    assert {task.topology.compute_device for task in tasks} == {"cpu", "cuda"}
    assert {task.can_replicate for task in tasks} == {True, False}
    assert {task.topology.memory_bytes_by_rank is None for task in tasks} == {True, False}


@pytest.mark.parametrize("seed", small_odd_tasks())
def test_no_sharder_finds_a_cheaper_plan(seed: int) -> None:
    priced = priced_task(odd_task(seed))
    found_ms = cost_ms("neuroshard", priced)
    others_ms = {sharder: cost_ms(sharder, priced) for sharder in OTHERS}
    planned = {sharder: ms for sharder, ms in others_ms.items() if ms is not None}
    assert found_ms is not None or not planned, f"only {planned} have plans"
    if found_ms is not None:
        assert lower_bound_ms(priced) <= found_ms * (1 + 1e-9)
        assert found_ms <= SAME * min(planned.values(), default=found_ms), planned


def test_tasks_of_later_seeds_have_modules_and_sequences() -> None:
    """Tasks of earlier seeds, which studies name, stay as they were."""
    earlier = [table for seed in range(200) for table in odd_task(seed).tables]
    assert all(table.pooled and not table.module for table in earlier)
    later = [odd_task(FIRST_MIXED + seed) for seed in range(40)]
    assert later[7] == odd_task(FIRST_MIXED + 7) != later[8]
    shares = [sum(table.pooled for table in task.tables) / len(task.tables) for task in later]
    assert min(shares) == 0.0
    assert max(shares) == 1.0
    assert any(0.0 < share < 1.0 for share in shares)
    assert max(len({table.module for table in task.tables}) for task in later) > 3
