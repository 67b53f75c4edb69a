"""Proofs that no plan fits: never wrong, and with the numbers that a user needs."""

import numpy as np

from dlrm_sharded.accesses.profiles import with_profiles
from dlrm_sharded.plans.tables import Table
from dlrm_sharded.plans.task import ShardingTask, Topology
from dlrm_sharded.search.constraints import Constraints
from dlrm_sharded.search.feasibility import why_infeasible
from tests.unit.search.made_up import all_plans, model_of, problem_of, tiny_task, with_memory


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
