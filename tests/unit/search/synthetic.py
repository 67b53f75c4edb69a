"""Synthetic cost models and tasks for the search, and all plans that a tiny task has.

The models have the form of a fitted one, with numbers that no hardware has: what holds for all of
them holds for whatever is fitted.

Letters: W ranks.
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from dlrm_sharded import Constraints, PlanCost, RunContext, SharderContext, validate
from dlrm_sharded.accesses.profiles import with_profiles
from dlrm_sharded.calibration.priors import learned_cost_model
from dlrm_sharded.cost.communication import EXCHANGES, CommunicationModel
from dlrm_sharded.cost.compute import ComputeModel, CostNet, DenseCosts
from dlrm_sharded.cost.exchange_terms import EXCHANGE_TERMS, LINKS, REDUCE_TERMS
from dlrm_sharded.cost.features import DEVICE_WORK, EXTENT, PROFILE
from dlrm_sharded.cost.learned import LearnedCostModel
from dlrm_sharded.cost.sequences import SequenceCosts
from dlrm_sharded.cost.widest import WIDEST_TERMS, WidestShard
from dlrm_sharded.files.errors import InvalidPlanError
from dlrm_sharded.plans.layouts import Replicas, RowBlocks
from dlrm_sharded.plans.plan import Shard, ShardingPlan
from dlrm_sharded.plans.tables import COLUMN_MULTIPLE, Table
from dlrm_sharded.plans.task import ShardingTask, Topology
from dlrm_sharded.search.build_problem import build_problem
from dlrm_sharded.search.problem import Problem
from dlrm_sharded.sharders.search import SearchSharder, search_sharder
from tests.unit.synthetic import column_shards, task_of, with_memory

NUM_CACHES = 2
EXCHANGE_SCALE = {"one": 0.02, "log2_ranks": 0.01, "shards": 1.0, "own_shards": 1.0}
"""Upper ends of weights; others are in ms per MB."""

SYNTHETIC = ("plain", "overflowing", "links", "receiving", "sparse", "warps")
MODELS = ("shipped", *SYNTHETIC)

HOSTS = [(1, 1), (1, 3), (2, 2), (4, 1), (2, 4)]
"""Hosts, and ranks on each."""

COST_ALONE = {"critical_path_share": 0.0, "split_error": 0.0}
"""Arguments of a sharder that minimizes the predicted cost and nothing else."""


@functools.cache
def model_of(name: str, seed: int = 0) -> LearnedCostModel:
    """The model of the package, or a synthetic one.

    `overflowing`: caches overflow at a few kB, and then cost a lot. `links`: most is spent between
    hosts. `receiving`: a rank waits for what it gets. `sparse`: few exchange terms have a weight.
    `warps`: the widest shard of a rank slows down all others, as on a GPU.
    """
    if name == "shipped":
        return learned_cost_model(RunContext())
    rng = np.random.default_rng([seed, SYNTHETIC.index(name)])
    overflow = name == "overflowing"
    device = DEVICE_WORK["cuda" if name == "warps" else "cpu"]
    compute = ComputeModel(
        profile_mean=np.array([3.0, 1.0, 0.3, 0.2]),
        profile_std=np.ones(len(PROFILE)),
        profile_low=np.zeros(len(PROFILE)),
        profile_high=np.array([9.0, 5.0, 1.0, 1.0]),
        forward=_net(rng, len(device.terms), overflow=overflow),
        backward=_net(rng, len(device.terms), overflow=overflow),
        device=device,
        crowding=(
            WidestShard(rng.exponential(0.1, (2, len(WIDEST_TERMS))))
            if device.has_warps
            else SequenceCosts()
        ),
        dense=DenseCosts(0.01, 0.3),
    )
    per_mb = {"links": 0.2, "receiving": 0.0}.get(name, 1.0)
    exchange = rng.uniform(0, 1, (len(EXCHANGES), len(EXCHANGE_TERMS)))
    exchange *= [EXCHANGE_SCALE.get(term, per_mb) for term in EXCHANGE_TERMS]
    for i, term in enumerate(EXCHANGE_TERMS):
        if name == "links" and term.endswith("_inter"):
            exchange[:, i] *= 20.0
    if name == "receiving":
        exchange[0, [EXCHANGE_TERMS.index(f"in_{link}") for link in LINKS]] = 2.0
        exchange[1, [EXCHANGE_TERMS.index(f"out_{link}") for link in LINKS]] = 2.0
    if name == "sparse":
        exchange *= rng.random(exchange.shape) < 0.2
    reduce = rng.uniform(0, 0.5, (len(EXCHANGES), len(REDUCE_TERMS)))
    return LearnedCostModel(
        compute,
        CommunicationModel(exchange, reduce),
        name=name,
        device="cpu",
        ranges=dict.fromkeys(EXTENT, (0.0, 1e18)),
        measured_links=LINKS,
    )


def _net(rng: np.random.Generator, num_terms: int, *, overflow: bool) -> CostNet:
    hidden = 3
    return CostNet(
        weights=(
            rng.normal(0, 0.7, (len(PROFILE), hidden)),
            rng.normal(0, 0.4, (hidden, num_terms)),
        ),
        biases=(rng.normal(0, 0.3, hidden), rng.uniform(-9.0, -4.0, num_terms)),
        cache_gain=rng.exponential(20.0 if overflow else 0.4, (num_terms, NUM_CACHES)),
        cache_mb=np.array([-2.0, -1.0]) if overflow else np.array([0.0, 2.0]),
        cache_slope=rng.uniform(2.0, 6.0, NUM_CACHES),
        launch_ms=float(rng.uniform(0.0, 0.1)),
        next_launch_ms=float(rng.uniform(0.0, 0.05)),
    )


def problem_of(
    task: ShardingTask,
    model: LearnedCostModel,
    constraints: Constraints | None = None,
    *,
    critical_path_share: float = 0.0,
    split_error: float = 0.0,
) -> Problem:
    return build_problem(
        model.cost_task(with_profiles(task)),
        constraints or Constraints(),
        critical_path_share=critical_path_share,
        split_error=split_error,
        all_replicas=True,
    )


def crowded_problem(seed: int, hosts: tuple[int, int], full: float) -> Problem:
    """Return the problem of up to 11 tables that take so much of the memory, under any model."""
    task = crowded_task(np.random.default_rng([seed, *hosts]), hosts, (1, 12), full)
    return problem_of(task, model_of(MODELS[seed % len(MODELS)], seed))


def searched_problem(seed: int, *, full: float = 0.5) -> Problem:
    """Return a problem of up to 15 tables whose search has something to decide."""
    hosts = [(1, 1), (1, 4), (2, 2), (4, 1), (3, 3)][seed % 5]
    task = crowded_task(np.random.default_rng(seed), hosts, (2, 16), full)
    model = model_of(MODELS[seed % len(MODELS)], seed)
    return problem_of(task, model, critical_path_share=0.05, split_error=0.05)


def crowded_task(
    rng: np.random.Generator, hosts: tuple[int, int], num_tables: tuple[int, int], full: float
) -> ShardingTask:
    task = unlimited_task(rng, hosts, int(rng.integers(*num_tables)))
    return with_memory(task, int(task.table_bytes / task.topology.world_size / full) + 64)


def searcher(name: str = "shipped", model_seed: int = 0, **arguments: Any) -> SearchSharder:
    """Return a NeuroShard sharder with one of `MODELS`, see `model_of`."""
    context = SharderContext(cost_model=model_of(name, model_seed))
    return search_sharder(context, **arguments)


def predicted(shards: tuple[Shard, ...], task: ShardingTask, model: LearnedCostModel) -> PlanCost:
    """What `model.predict` gives, without its warnings; the tables have reuse histograms."""
    plan = ShardingPlan(task.topology.world_size, shards)
    return model.cost_task(task).predict(plan)


def all_plans(task: ShardingTask) -> Iterator[tuple[Shard, ...]]:
    """Every plan that is valid, but for the order of columns; a table once on a rank."""
    layouts = [list(layouts_of(table, task.topology)) for table in task.tables]
    for chosen in itertools.product(*layouts):
        shards = tuple(itertools.chain.from_iterable(chosen))
        try:
            validate(ShardingPlan(task.topology.world_size, shards), task)
        except InvalidPlanError:  # memory
            continue
        yield shards


def layouts_of(table: Table, topology: Topology) -> Iterator[list[Shard]]:
    """A table's columns on any ranks in any widths, its rows on all ranks or a host's, replicas."""
    world_size, num_steps = topology.world_size, table.embedding_dim // COLUMN_MULTIPLE
    whole = Shard.whole(table, 0)
    for edges in itertools.combinations_with_replacement(range(num_steps + 1), world_size - 1):
        bounds = itertools.pairwise(COLUMN_MULTIPLE * edge for edge in (0, *edges, num_steps))
        yield [
            dataclasses.replace(whole, rank=rank, cols=cols)
            for rank, cols in enumerate(bounds)
            if cols[0] < cols[1]
        ]
    hosts = range(0, world_size, topology.ranks_per_host)
    groups = {range(world_size), *(range(h, h + topology.ranks_per_host) for h in hosts)}
    for ranks in sorted(groups, key=lambda ranks: (len(ranks), ranks.start)):
        if len(ranks) > 1 and RowBlocks(ranks).is_possible(table):
            yield RowBlocks(ranks).shards(table)
    if world_size > 1:
        yield Replicas(world_size).shards(table)


def tiny_task(
    seed: int,
    *,
    num_tables: int,
    hosts: tuple[int, int] | None = None,
    full: float = 0.7,
    sequences: tuple[int, ...] = (),
    modules: str = "",
    width: int | None = None,
) -> ShardingTask:
    """Few narrow tables on 2 or 3 ranks, or on hosts x ranks; `full` of the memory is taken.

    Args:
        sequences: numbers of the tables whose vectors are not pooled.
        modules: names of the modules of all tables, of one letter; of none without.
        width: columns of all tables, for sequences of one module.
    """
    rng = np.random.default_rng([seed, num_tables])
    world_size = hosts[0] * hosts[1] if hosts else int(rng.integers(2, 4))
    topology = {
        "local_world_size": hosts[1] if hosts else None,
        "optimizer_bytes_per_row": int(rng.choice([0, 4])),
    }
    tables = tuple(
        Table(
            f"t{i}",
            num_embeddings=round(10 ** rng.uniform(0.5, 6.0)),
            embedding_dim=width or int(4 * rng.integers(1, 5)),
            pooling_factor=float(round(10 ** rng.uniform(-0.5, 1.5), 2)),
            pooled=i not in sequences,
            module=modules[i : i + 1],
        )
        for i in range(num_tables)
    )
    batch_size = int(rng.choice([256, 2048]))
    task = with_profiles(task_of(tables, world_size, 2**50, batch_size, **topology))
    return with_memory(task, int(task.table_bytes / world_size / full) + 1)


def unlimited_task(
    rng: np.random.Generator, hosts: tuple[int, int], num_tables: int
) -> ShardingTask:
    """Tables of up to 128 columns on hosts x ranks, with memory for all tables on every rank."""
    topology = {"local_world_size": hosts[1], "inter_host_bytes_per_s": 5e9}
    tables = tuple(
        Table(
            f"t{i}",
            num_embeddings=round(10 ** rng.uniform(1.0, 6.0)),
            embedding_dim=int(4 * rng.integers(1, 33)),
            pooling_factor=float(10 ** rng.uniform(-0.5, 1.5)),
        )
        for i in range(num_tables)
    )
    batch_size = int(rng.choice([1024, 8192]))
    return with_profiles(task_of(tables, hosts[0] * hosts[1], 2**50, batch_size, **topology))


def random_plan(rng: np.random.Generator, task: ShardingTask) -> tuple[Shard, ...]:
    """Tables whole, in two column shards, in row blocks on all ranks or a host's, or replicas."""
    topology = task.topology
    world_size, per_host = topology.world_size, topology.ranks_per_host
    shards: list[Shard] = []
    for table in task.tables:
        layouts = ["whole", "columns", "rows", "host_rows", "replicas"]
        layout = rng.choice(layouts, p=[0.5, 0.2, 0.1, 0.1, 0.1])
        whole = Shard.whole(table, int(rng.integers(world_size)))
        other = int(rng.integers(world_size))
        ranks = range(world_size)
        if layout == "host_rows":
            ranks = range(other - other % per_host, other - other % per_host + per_host)
        is_block = layout.endswith("rows") and len(ranks) > 1
        if layout == "columns" and table.embedding_dim > COLUMN_MULTIPLE and other != whole.rank:
            edge = COLUMN_MULTIPLE * int(rng.integers(1, table.embedding_dim // COLUMN_MULTIPLE))
            pieces = (whole.rank, edge), (other, table.embedding_dim - edge)
            shards += column_shards(table, *pieces)
        elif layout == "replicas" and world_size > 1:
            shards += Replicas(world_size).shards(table)
        elif is_block and RowBlocks(ranks).is_possible(table):
            shards += RowBlocks(ranks).shards(table)
        else:
            shards.append(whole)
    return tuple(shards)
