"""NeuroShard's search: each published rule, faults included, and a plain version of it all."""

import dataclasses
import functools
import math
from collections import defaultdict
from collections.abc import Iterator

import numpy as np
import pytest

from dlrm_sharded import PlanCost, RunContext, ShardingTask, Table, validate
from dlrm_sharded.accesses.profiles import with_profiles
from dlrm_sharded.calibration.priors import learned_cost_model
from dlrm_sharded.commands.sharders import make_planner, make_sharder
from dlrm_sharded.cost.learned import LearnedCostModel
from dlrm_sharded.cost.published_nets import neuroshard_cost_model
from dlrm_sharded.datasets.task_sets import TASK_SETS
from dlrm_sharded.files.errors import ConfigError, InfeasibleTaskError
from dlrm_sharded.plans.plan import ShardingPlan
from dlrm_sharded.sharders.base import SharderContext
from dlrm_sharded.sharders.neuroshard import NeuroShardSharder, _say_what_it_is
from dlrm_sharded.testing import check_sharder, small_tasks
from tests.unit.search.synthetic import model_of
from tests.unit.synthetic import tables_of, task_of, with_topology

SMALL = small_tasks()
HAVE_PLANS = {
    *("w2-mixed", "w3-mixed", "w3-tight", "w3-different_memory", "w8-equal"),
    "w3-one_narrow_table",
}
HAVE_NONE = {"w2-huge_table", "w3-one_too_many", "w2-repair"}
MODEL = model_of("shipped")
Columns = dict[tuple[str, int], int]
"""How many columns of a table a rank has."""


def paper_sharder(model: LearnedCostModel = MODEL, **arguments: int) -> NeuroShardSharder:
    return NeuroShardSharder(SharderContext(cost_model=model), **arguments)


def profiled(world_size: int, *shapes: tuple[int, int, float], memory: int = 10**10):
    return with_profiles(task_of(tables_of(*shapes), world_size, memory, 1024 * world_size))


def columns_of(plan: ShardingPlan) -> Columns:
    columns: Columns = defaultdict(int)
    for shard in plan.shards:
        columns[shard.table, shard.rank] += shard.num_cols
    return dict(columns)


def by_rank(plan: ShardingPlan) -> list[int]:
    return [sum(s.num_cols for s in plan.shards if s.rank == r) for r in range(plan.world_size)]


@pytest.mark.parametrize("name", SMALL)
def test_contract(name: str) -> None:
    task = SMALL[name]
    plan = check_sharder(paper_sharder, task)
    assert name not in (HAVE_PLANS if plan is None else HAVE_NONE)
    if plan is None:
        return
    assert len(columns_of(plan)) == len(plan.shards), "a rank has one shard of a table"
    mean = sum(table.embedding_dim for table in task.tables) / plan.world_size
    assert is_narrow(task) or max(by_rank(plan)) <= 1.5 * mean


def test_needs_a_cost_model() -> None:
    with pytest.raises(ConfigError, match="choose cost_model=learned"):
        NeuroShardSharder(SharderContext())
    with pytest.raises(ConfigError, match=r"sharder\.costs is 'mine'; known: learned, neuroshard"):
        make_sharder("neuroshard", costs="mine")


def test_searches_by_the_published_networks() -> None:
    """By those of the run, or of the package whatever the run has; they know 2 and 4 ranks."""
    nets, learned = neuroshard_cost_model(RunContext()), learned_cost_model(RunContext())
    task = with_profiles(TASK_SETS["paper"](num=1)[0].task)
    by_nets = make_planner("neuroshard", nets)
    as_published = make_planner("neuroshard", learned, costs="neuroshard")
    by_learned = make_planner("neuroshard", learned)
    made = [planner.plan(task) for planner in (by_nets, as_published, by_learned)]
    assert made[0][0] == made[1][0] != made[2][0]
    assert [report.costs for _, report in made] == ["neuroshard", "neuroshard", "learned"]
    assert [p.uses_costs for p in (by_nets, as_published, by_learned)] == [False, False, True]
    eight = task_of(task.tables, 8, 2**30, 1024)
    with pytest.raises(ConfigError, match="a communication net for each of 2, 4 ranks, none for 8"):
        as_published.plan(eight)


def test_says_once_what_the_name_means(caplog: pytest.LogCaptureFixture) -> None:
    _say_what_it_is.cache_clear()
    caplog.set_level("INFO")
    for _ in range(2):
        make_sharder("neuroshard", learned_cost_model(RunContext()))
    said = "since 0.3, sharder=neuroshard is the published method; 0.2's is sharder=search"
    assert caplog.messages.count(said) == 1


@pytest.mark.parametrize("key", ["beam_width", "num_candidates", "num_limits"])
def test_counts_are_checked(key: str) -> None:
    with pytest.raises(ConfigError, match=rf"sharder\.{key} is 0"):
        paper_sharder(**{key: 0})


def test_at_most_10_splits() -> None:
    """15 halvings give each of 16 ranks its 4 columns; published, the search ends after 10."""
    task = profiled(16, (1000, 64, 1.0), memory=4 * 4 * 1000)
    message = r"may be one; it tried \d+ choices of at most 10 column splits;"
    with pytest.raises(InfeasibleTaskError, match=message):
        paper_sharder().shard(task)
    assert by_rank(paper_sharder(max_splits=15).shard(task)) == [4] * 16


@pytest.mark.parametrize(
    ("world_size", "widths"),
    [(8, [4]), (64, [64]), (4, [100, 4, 4]), (2, [76, 4]), (8, [4] * 10)],
    ids=str,
)
def test_narrow_tables_on_many_ranks(world_size: int, widths: list[int]) -> None:
    """The paper's limits leave no plan, as ranks would have to stay empty or differ much."""
    task = profiled(world_size, *((1000, width, 1.0) for width in widths), memory=2**30)
    plan = paper_sharder().shard(task)
    validate(plan, task)
    assert sum(1 for cols in by_rank(plan) if cols) <= len(widths) + 10


def test_halves_that_meet_are_one_shard() -> None:
    """A half and a quarter, which TorchRec would not train beside each other.

    The ranks have 24 columns each, and `odd` and `rest` no halves: `large` becomes 16, 8 and 8.
    """
    shapes = {"large": (1000, 32, 3.0), "odd": (1000, 12, 3.0), "rest": (1000, 4, 3.0)}
    tables = [Table(name, *shape) for name, shape in shapes.items()]
    task = with_profiles(task_of(tables, 2, 24 * 4 * 1000, 2048))
    plan = paper_sharder().shard(task)
    validate(plan, task)
    of_large = [shard for shard in plan.shards if shard.table == "large"]
    assert [shard.cols for shard in of_large] in ([(0, 24), (24, 32)], [(0, 8), (8, 32)])


def plain_search(
    task: ShardingTask,
    *,
    beam_width: int,
    num_candidates: int,
    num_limits: int,
    max_splits: int,
    has_limits: bool = True,
) -> Columns | None:
    """The published rules one after another, with a prediction of a whole plan for every cost.

    A node is a list of (table, width).
    """
    num_ranks, tables, topology = task.topology.world_size, task.tables, task.topology
    mean = sum(table.embedding_dim for table in tables) / num_ranks

    def predict(placed: list[tuple[int, int, int]]) -> PlanCost:
        # shards of different widths that meet on a rank have a prediction only as separate tables
        pieces = tuple(
            dataclasses.replace(tables[t], name=str(i), embedding_dim=width)
            for i, (t, width, _) in enumerate(placed)
        )
        piece_task = dataclasses.replace(task, tables=pieces)
        return MODEL.predict(
            ShardingPlan.from_ranks(piece_task, [rank for *_, rank in placed]), piece_task
        )

    @functools.cache
    def compute_ms(shards: tuple[tuple[int, int], ...]) -> float:
        if not shards:
            return 0.0
        cost = predict([(t, width, 0) for t, width in shards]).per_rank[0]
        return cost.fwd_compute_ms + cost.bwd_compute_ms

    def size(shard: tuple[int, int]) -> int:
        return topology.shard_bytes("", tables[shard[0]].num_embeddings, shard[1])

    def greedy(node: list[tuple[int, int]], most_cols: float) -> list[tuple[int, int, int]] | None:
        ranks: list[list[tuple[int, int]]] = [[] for _ in range(num_ranks)]
        placed = []
        for shard in sorted(node, key=lambda shard: (-compute_ms((shard,)), shard)):
            best = None
            for r in range(num_ranks):
                memory = sum(map(size, ranks[r]))
                cols = sum(width for _, width in ranks[r])
                if memory + size(shard) > topology.memory_bytes or cols + shard[1] > most_cols:
                    continue
                key = (compute_ms(tuple(ranks[r])), memory, r)
                best = key if best is None else min(best, key)
            if best is None:
                return None
            ranks[best[2]].append(shard)
            placed.append((*shard, best[2]))
        return placed

    def evaluate(node: list[tuple[int, int]]) -> tuple[float, list[tuple[int, int, int]]]:
        found: tuple[float, list[tuple[int, int, int]]] = (math.inf, [])
        for i in range(num_limits):
            limit = (1.0 + 0.5 * i / (num_limits - 1)) * mean if has_limits else math.inf
            placed = greedy(node, limit)
            if placed is not None:
                cost_ms = predict(placed).cost_ms
                found = min(found, (cost_ms, placed), key=lambda pair: pair[0])
        return found

    def children(node: list[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
        indices = range(len(node))
        chosen = sorted(indices, key=lambda i: -size(node[i]))[:num_candidates]
        chosen += sorted(indices, key=lambda i: -compute_ms((node[i],)))[:num_candidates]
        for i in sorted(set(chosen)):
            t, width = node[i]
            if width % 8 == 0:
                yield [*node[:i], (t, width // 2), *node[i + 1 :], (t, width // 2)]

    beam = [[(t, table.embedding_dim) for t, table in enumerate(tables)]]
    best = evaluate(beam[0])
    for _ in range(max_splits):
        nodes = [(evaluate(child), child) for node in beam for child in children(node)]
        best = min([best, *(found for found, _ in nodes)], key=lambda pair: pair[0])
        nodes.sort(key=lambda pair: pair[0][0])
        beam = [child for _, child in nodes[:beam_width]]
    if best[0] == math.inf:
        return None
    columns: Columns = defaultdict(int)
    for t, width, rank in best[1]:
        columns[tables[t].name, rank] += width
    return dict(columns)


def random_task(seed: int) -> ShardingTask:
    """Tables of all sizes: few that fill the ranks, or many, with few ids and much to exchange."""
    rng = np.random.default_rng(seed)
    world_size = int(rng.integers(1, 4))
    few = rng.random() < 0.5
    shapes = [
        (
            round(10 ** rng.uniform(2, 4 if few else 6)),
            int(rng.choice([4, 8, 12, 16, 24, 32, 48, 64, 128])),
            float(10 ** rng.uniform(-2, 2 if few else 0)),
        )
        for _ in range(rng.integers(1, 5) if few else rng.integers(6, 13))
    ]
    total = sum(4 * rows * cols for rows, cols, _ in shapes)
    memory_ratio = rng.uniform(1.0, 1.3 if few else 3.0)
    task = profiled(world_size, *shapes, memory=int(total / world_size * memory_ratio))
    features = {table.name: int(rng.choice([1, 1, 4])) for table in task.tables}
    return task.with_values(num_features=features)


def is_narrow(task: ShardingTask) -> bool:
    widths = [table.embedding_dim for table in task.tables]
    parts = [next(width >> n for n in range(9) if (width >> n) % 8) for width in widths]
    return sum(widths) / task.topology.world_size < 2 * max(parts)


@pytest.mark.parametrize("seed", range(60))
def test_finds_what_a_plain_search_finds(seed: int) -> None:
    task = random_task(seed)
    arguments = {"beam_width": 2, "num_candidates": 2, "num_limits": 4, "max_splits": 3}
    expected = plain_search(task, **arguments)
    if expected is None and is_narrow(task):
        expected = plain_search(task, **arguments, has_limits=False)
    sharder = paper_sharder(**arguments)
    if expected is None:
        with pytest.raises(InfeasibleTaskError, match="found no plan"):
            sharder.shard(task)
    else:
        assert columns_of(sharder.shard(task)) == expected


@pytest.mark.parametrize(
    ("world_size", "limit", "num_shards"), [(1, None, 2), (2, None, 2), (1, 2046, 4)]
)
def test_shards_are_not_too_wide_for_a_gpu(
    world_size: int, limit: int | None, num_shards: int
) -> None:
    """Also where halves of a table meet on a rank, which become shards of equal widths there."""
    task = profiled(world_size, (100, 4096, 2.0))
    task = with_topology(task, compute_device="cuda", column_limit=limit)
    plan = paper_sharder().shard(task)
    validate(plan, task)
    assert [shard.num_cols for shard in plan.shards] == [4096 // num_shards] * num_shards
