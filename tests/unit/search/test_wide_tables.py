"""Tables wider than a lookup on a GPU supports: cut so far that every shard can be looked up."""

import dataclasses

import numpy as np
import pytest

from dlrm_sharded import Constraints, ShardingPlan, ShardingTask, validate
from dlrm_sharded.accesses.profiles import with_profiles
from dlrm_sharded.cost.bound import lower_bound_ms
from dlrm_sharded.cost.shapes import Shapes
from dlrm_sharded.cost.workload import workload_of_plan
from dlrm_sharded.files.errors import InfeasibleTaskError
from dlrm_sharded.plans.tables import MAX_SHARD_COLUMNS, Table
from dlrm_sharded.search.feasibility import why_infeasible
from dlrm_sharded.search.problem import Demand
from dlrm_sharded.search.state import State
from dlrm_sharded.search.state_shards import state_shards
from tests.unit.search.synthetic import COST_ALONE, model_of, predicted, problem_of, searcher
from tests.unit.synthetic import task_of, with_memory

LIMIT = MAX_SHARD_COLUMNS["cuda"]
SMALL = (Table("a", 300, 16, 3.0), Table("b", 200, 128, 1.0))


def wide_task(*widths: int, world_size: int, device: str = "cuda") -> ShardingTask:
    wide = tuple(Table(f"wide{i}", 100 + i, width, 2.0) for i, width in enumerate(widths))
    tables, batch_size = (*wide, *SMALL), 64 * world_size
    return with_profiles(task_of(tables, world_size, batch_size=batch_size, device=device))


@pytest.mark.parametrize("seed", range(12))
def test_plans_are_valid_and_not_below_the_bound(seed: int) -> None:
    """Also with little memory, and where only shards of exactly the limit fit."""
    rng = np.random.default_rng(seed)
    world_size = int(rng.integers(2, 6))
    widths = 4 * rng.integers(LIMIT // 4, world_size * LIMIT // 4 + 1, 2)
    if seed % 3 == 0:
        widths[0] = world_size * LIMIT
    task = wide_task(*widths.tolist(), world_size=world_size)
    task = with_memory(task, int(task.table_bytes / world_size / rng.uniform(0.3, 0.9)))
    name = ("shipped", "plain", "overflowing", "warps")[seed % 4]
    plan = searcher(name, time_budget_s=1e6, patience=2, **COST_ALONE).shard(task)
    validate(plan, task)
    cost_ms = predicted(plan.shards, task, model_of(name)).cost_ms
    assert lower_bound_ms(model_of(name).cost_task(task)) <= cost_ms * (1 + 1e-9)


@pytest.mark.parametrize(
    ("width", "num_shards"), [(LIMIT + 4, 3), (2 * LIMIT, 2), (6000, 3), (16_384, 8)]
)
@pytest.mark.parametrize("name", ["plain", "warps"])
def test_one_rank_cuts_a_table_into_equal_shards(name: str, width: int, num_shards: int) -> None:
    task, model = wide_task(width, world_size=1), model_of(name)
    plan = searcher(name, **COST_ALONE).shard(task)
    validate(plan, task)
    widths = [s.num_cols for s in plan.shards if s.table == "wide0"]
    assert len(set(widths)) == 1
    assert len(widths) >= num_shards, "more of them may cost less"
    cost_ms = predicted(plan.shards, task, model).cost_ms
    assert lower_bound_ms(model.cost_task(task)) <= cost_ms * (1 + 1e-9)


@pytest.mark.parametrize("width", [3 * LIMIT, 16_384])
def test_costs_of_equal_shards_are_those_of_the_plan(width: int) -> None:
    """The search knows what a plan with several shards of a table on a rank costs and takes."""
    task, model = wide_task(width, world_size=2), model_of("warps")
    topology = dataclasses.replace(task.topology, optimizer_bytes_per_row=4)
    task = dataclasses.replace(task, topology=topology)
    problem = problem_of(task, model)
    unit, steps = 0, int(problem.num_steps[0])
    for on_first in range(1, steps):
        state = State(problem)
        for other in range(1, problem.num_units):
            state.set_width(other, 0, int(problem.num_steps[other]))
        state.set_width(unit, 0, on_first)
        state.set_width(unit, 1, steps - on_first)
        state.refresh()
        plan = ShardingPlan(2, state_shards(state))
        validate(plan, task)
        free_bytes = problem.capacity_bytes - np.array(plan.bytes_by_rank(topology))
        assert state.free_bytes.tolist() == free_bytes.tolist()
        computation = state.demand[:, Demand.VECTOR]
        workload = workload_of_plan(plan, task)
        assert computation == pytest.approx(workload.by_rank(model.compute.vectors(workload)))


@pytest.mark.parametrize("width", [LIMIT + 4, 3 * LIMIT, 16_380])
def test_widths_include_the_limit(width: int) -> None:
    task = wide_task(width, world_size=2)
    shapes = Shapes.from_task(task, model_of("plain").compute, max_widths=64)
    assert LIMIT % int(shapes.step[0]) == 0
    of_wide = shapes.num_shards[shapes.first[0] : shapes.first[1]]
    assert (of_wide == 1).sum() * int(shapes.step[0]) == LIMIT
    assert (shapes.num_shards[shapes.first[1] :] == 1).all()
    assert [blocks.possible[0] for blocks in shapes.row_blocks] == [False]
    assert all(blocks.possible[1:].all() for blocks in shapes.row_blocks)


def test_why_infeasible() -> None:
    task = wide_task(4 * 523, world_size=1)  # no equal shards but those of 4 columns
    with pytest.raises(InfeasibleTaskError, match=r"'wide0' has 2,092 columns.* 2,048 .*on cuda"):
        searcher("shipped").shard(task)

    def why(constraints: Constraints) -> str | None:
        task = wide_task(2 * LIMIT, world_size=4)
        return why_infeasible(problem_of(task, model_of("shipped"), constraints))

    assert why(Constraints()) is None
    assert why(Constraints(pin={"wide0": [2]})) is None
    assert "not to be split" in str(why(Constraints(unsplit=["wide0"])))
    assert "'wide0', 'a'" in str(why(Constraints(together=[["a", "wide0"]])))
