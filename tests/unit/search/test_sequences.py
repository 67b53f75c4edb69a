"""Sequences and modules in the search: a state costs what is predicted, and plans are the best.

Letters: W ranks.
"""

import dataclasses

import numpy as np
import pytest

from dlrm_sharded import InfeasibleTaskError, Shard, ShardingPlan, Table
from dlrm_sharded.plans.layouts import Replicas, RowBlocks
from dlrm_sharded.plans.task import ShardingTask
from dlrm_sharded.search.state import COLUMNS, State
from dlrm_sharded.search.state_shards import load_plan, state_shards
from dlrm_sharded.sharders.heuristics import GreedySharder
from tests.unit.search.synthetic import (
    MODELS,
    model_of,
    predicted,
    problem_of,
    searcher,
    unlimited_task,
)
from tests.unit.synthetic import task_of, with_topology

HOSTS = [(1, 1), (1, 4), (2, 3), (3, 1)]
TOTALS = {"cost_ms": 0.0, "critical_path_ms": 1.0}


def even_task(rng: np.random.Generator, hosts: tuple[int, int], num_per_rank: int) -> ShardingTask:
    """Tables in turn of two modules of bags, and of two of sequences; W tables of each exchange
    alike, and row blocks are all equal."""
    world_size = hosts[0] * hosts[1]
    task = with_topology(
        unlimited_task(rng, hosts, 4 * world_size * num_per_rank), compute_device="cuda"
    )
    factors = rng.uniform(0.5, 20.0, 4 * num_per_rank)
    tables = tuple(
        dataclasses.replace(
            table,
            embedding_dim=24,
            num_embeddings=world_size * table.num_embeddings,
            pooling_factor=float(factors[i // world_size]),
            module="abcd"[i // world_size % 4],
            pooled=i // world_size % 4 < 2,
        )
        for i, table in enumerate(task.tables)
    )
    return dataclasses.replace(task, tables=tables)


def even_plan(rng: np.random.Generator, task: ShardingTask) -> tuple[Shard, ...]:
    """Every W tables whole on a rank each, in row blocks on all ranks or a host's, or replicas."""
    world_size, shards = task.topology.world_size, list[Shard]()
    per_host = task.topology.ranks_per_host
    for first in range(0, len(task.tables), world_size):
        kind = rng.choice(["whole", "rows", "host_rows", "replicas"], p=[0.4, 0.2, 0.2, 0.2])
        for rank, table in enumerate(task.tables[first : first + world_size]):
            if kind == "host_rows" and table.pooled and per_host > 1:
                host = rank - rank % per_host
                shards += RowBlocks(range(host, host + per_host)).shards(table)
            elif kind == "rows" and world_size > 1:
                shards += RowBlocks(range(world_size)).shards(table)
            elif kind == "replicas" and world_size > 1:
                shards += Replicas(world_size).shards(table)
            else:
                shards.append(Shard.whole(table, rank))
    return tuple(shards)


@pytest.mark.parametrize("total", TOTALS)
@pytest.mark.parametrize("name", MODELS)
def test_states_cost_what_is_predicted_whatever_moves_led_there(name: str, total: str) -> None:
    rng = np.random.default_rng(11)
    for seed, hosts in enumerate(HOSTS * 2):
        task, model = even_task(rng, hosts, 1 + seed % 2), model_of(name, seed)
        problem = problem_of(task, model, critical_path_share=TOTALS[total])
        state = State(problem)
        for _ in range(3):
            shards = even_plan(rng, task)
            for unit in range(state.problem.num_units):  # from the plan before, and not from none
                for rank in list(state.widths[unit]):
                    state.set_width(unit, rank, 0)
                state.set_group(unit, COLUMNS)
            plan = ShardingPlan(task.topology.world_size, shards)
            assert load_plan(state, plan.shards_by_table())
            assert sorted(state_shards(state)) == sorted(shards)
            expected = getattr(predicted(shards, task, model), total)
            assert state.objective_ms == pytest.approx(expected, rel=1e-7)


def test_sequences_that_fit_neither_whole_nor_in_row_blocks_have_no_plan() -> None:
    """They have too few rows for blocks on all ranks, and are not split by columns."""
    tables = [Table(f"ids{i}", 3, 16, 2.0, pooled=False) for i in range(2)]
    task = task_of(tables, 5, 3 * 16 * 4 - 1, 64)
    with pytest.raises(InfeasibleTaskError, match="'ids0' needs 192 B, in pieces of 192 B or more"):
        searcher("plain", 0).shard(task)


def test_sequences_too_wide_for_a_lookup_are_refused_by_table() -> None:
    tables = [Table("bag", 3, 4096, 2.0), Table("wide", 3, 4096, 2.0, pooled=False)]
    task = with_topology(task_of(tables, 4, 2**20, 64), compute_device="cuda")
    message = (
        r"^table 'wide' is a sequence .* and has 4,096 columns, .* 2,048 columns .* reduce its emb"
    )
    for sharder in (searcher("plain", 0, replicate="never"), GreedySharder("dim")):
        with pytest.raises(InfeasibleTaskError, match=message):
            sharder.shard(task)
