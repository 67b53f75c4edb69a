"""First plans: whole, within memory and constraints; and what is said where there is none."""

import numpy as np
import pytest

from dlrm_sharded.profiles import with_profiles
from dlrm_sharded.search.constraints import Constraints
from dlrm_sharded.search.construct import (
    ANY_HOST,
    Cut,
    construct,
    cut_all,
    may_hold,
    options,
    why_infeasible,
)
from dlrm_sharded.search.problem import Problem
from dlrm_sharded.search.state import COLUMNS, ROWS, State
from dlrm_sharded.tables import Table
from dlrm_sharded.task import ShardingTask, Topology
from tests.unit.search.made_up import (
    MODELS,
    all_plans,
    model_of,
    problem_of,
    roomy_task,
    tiny_task,
    with_memory,
)

HOSTS = [(1, 1), (1, 3), (2, 2), (4, 1), (2, 4)]


def is_whole(state: State) -> bool:
    """Everything is somewhere, where it may be, within memory."""
    problem = state.problem
    steps = [sum(widths.values()) for widths in state.widths]
    wanted = np.where(state.mode == COLUMNS, problem.num_steps, 0)
    allowed = all(
        may_hold(state, unit)[rank] for unit, widths in enumerate(state.widths) for rank in widths
    )
    return steps == wanted.tolist() and allowed and bool((state.free_bytes >= 0).all())


def problem(seed: int, hosts: tuple[int, int], full: float) -> Problem:
    rng = np.random.default_rng([seed, *hosts])
    task = roomy_task(rng, hosts, int(rng.integers(1, 12)))
    task = with_memory(task, int(task.table_bytes / task.topology.world_size / full) + 64)
    return problem_of(task, model_of(MODELS[seed % len(MODELS)], seed))


@pytest.mark.parametrize("hosts", HOSTS, ids=lambda hosts: f"{hosts[0]}x{hosts[1]}")
@pytest.mark.parametrize("full", [0.2, 0.8, 0.95])
def test_constructs_whole_plans(hosts: tuple[int, int], full: float) -> None:
    found = 0
    for seed in range(20):
        of = problem(seed, hosts, full)
        for target in (0.0, 1.0, 100.0):
            cuts = cut_all(of, target * float(of.load[of.whole].sum()) / of.world_size)
            state = construct(of, cuts)
            if state is not None:
                found += 1
                assert is_whole(state)
                assert state.log == []
    assert found >= 54


def test_cuts_add_up_and_fit_their_target() -> None:
    for seed in range(20):
        of = problem(seed, HOSTS[seed % len(HOSTS)], 0.3)
        for target_ms in (0.0, 0.5, 5.0, 1e9):
            for unit, cut in enumerate(cut_all(of, target_ms)):
                if cut.mode != COLUMNS:
                    blocks = of.rows if cut.mode == ROWS else of.host_rows
                    assert blocks is not None
                    assert blocks.possible[unit]
                    continue
                assert sum(cut.widths) == of.num_steps[unit]
                assert max(cut.widths) - min(cut.widths) <= 1
                assert len(cut.widths) <= of.world_size
        whole = [Cut(COLUMNS, (int(steps),)) for steps in of.num_steps]
        fits = of.size_bytes[of.whole] <= of.capacity.max()
        assert [c for c, fit in zip(cut_all(of, 1e9), fits, strict=True) if fit] == [
            c for c, fit in zip(whole, fits, strict=True) if fit
        ]


def test_options_fit_a_rank() -> None:
    for seed in range(20):
        of = problem(seed, HOSTS[seed % len(HOSTS)], 0.9)
        for unit in range(of.num_units):
            for option in options(of, unit):
                size = of.size_bytes[of.first[unit] + np.array(option.cut.widths, dtype=int) - 1]
                if option.cut.mode == ROWS:
                    size = of.rows.size_bytes[[unit]]
                elif option.cut.mode == ANY_HOST:
                    assert of.host_rows is not None
                    size = of.host_rows.size_bytes[[unit]]
                assert size.max() <= of.capacity.max()
                assert option.work_ms > 0


def test_what_is_said_to_fit_no_rank_fits_none() -> None:
    """And what has a plan is not said to have none."""
    rng = np.random.default_rng(0)
    said = {True: 0, False: 0}
    for seed in range(120):
        hosts = (None, (2, 2), (3, 1))[seed % 3]
        task = tiny_task(seed, num_tables=2, hosts=hosts)
        mean = task.table_bytes / task.topology.world_size
        memory = (mean * 10 ** rng.uniform(-0.2, 0.5, task.topology.world_size)).astype(int) + 1
        task = with_memory(task, *memory.tolist())
        reason = why_infeasible(problem_of(task, model_of("shipped")))
        has_plan = any(True for _ in all_plans(task))
        said[reason is not None] += 1
        assert not (reason and has_plan), (reason, task)
    assert said[True] > 5
    assert said[False] > 50


def task_of(*tables: Table, memory: int, world_size: int = 4) -> ShardingTask:
    topology = Topology(world_size, memory, compute_device="cpu")
    return with_profiles(ShardingTask(tables, topology, 256))


def test_says_why() -> None:
    model = model_of("shipped")
    total = problem_of(task_of(Table("a", 100, 16, 1.0), memory=1599), model)
    assert "the tables need 6,400 B" in str(why_infeasible(total))
    assert "all 4 ranks together have 6,396 B" in str(why_infeasible(total))

    few_rows = task_of(Table("tall", 3, 4, 1.0), Table("b", 1, 4, 1.0), memory=47)
    assert "'tall' needs 48 B, in pieces of 48 B or more" in str(
        why_infeasible(problem_of(few_rows, model))
    )

    roomy = task_of(Table("a", 100, 16, 1.0), Table("b", 100, 16, 1.0), memory=6400)
    assert why_infeasible(problem_of(roomy, model)) is None
    pinned = problem_of(roomy, model, Constraints(pin={"b": [1], "a": [2]}))
    assert why_infeasible(pinned) is None
    group = problem_of(roomy, model, Constraints(together=[["a", "b"]]))
    assert "'a', 'b' needs 12,800 B" in str(why_infeasible(group))
    smaller = with_memory(roomy, 6399)
    assert why_infeasible(problem_of(smaller, model)) is None
    unsplit = problem_of(smaller, model, Constraints(unsplit=["b"]))
    assert "'b' needs 6,400 B, in pieces of 6,400 B or more" in str(why_infeasible(unsplit))
    narrow = problem_of(smaller, model, Constraints(pin={"b": [3]}))
    assert "its 1 ranks have 6,399 B or less each" in str(why_infeasible(narrow))


def test_wide_tables_are_not_said_to_need_wide_pieces() -> None:
    """The search cuts 260 columns at multiples of 8; a plan may at those of 4."""
    task = task_of(Table("wide", 1000, 260, 1.0), memory=16_000, world_size=65)
    assert why_infeasible(problem_of(task, model_of("shipped"))) is None
