"""Proofs that no plan fits: never wrong, and with the numbers that a user needs."""

from typing import Any

import numpy as np

from dlrm_sharded import Constraints, ShardingTask, Table
from dlrm_sharded.accesses.profiles import with_profiles
from dlrm_sharded.search.feasibility import why_infeasible, why_none_found
from tests.unit.search.synthetic import all_plans, model_of, problem_of, tiny_task, with_memory
from tests.unit.synthetic import task_of


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


def tight(*tables: Table, memory: int, world_size: int = 4) -> ShardingTask:
    return with_profiles(task_of(tables, world_size, memory, 256))


def why(task: ShardingTask, **constraints: Any) -> str:
    """Why no plan fits, in words: `None` if one may."""
    problem = problem_of(task, model_of("shipped"), Constraints(**constraints))
    return str(why_infeasible(problem))


def test_says_why() -> None:
    tables = Table("a", 100, 16, 1.0), Table("b", 100, 16, 1.0)
    total = why(tight(tables[0], memory=1599))
    assert "the tables need 6,400 B" in total
    assert "all 4 ranks together have 6,396 B" in total
    few_rows = tight(Table("tall", 3, 4, 1.0), Table("b", 1, 4, 1.0), memory=47)
    assert "'tall' needs 48 B, in pieces of 48 B or more" in why(few_rows)
    enough, smaller = tight(*tables, memory=6400), tight(*tables, memory=6399)
    for possible in (why(enough), why(enough, pin={"b": [1], "a": [2]}), why(smaller)):
        assert possible == "None"
    assert "'a', 'b' needs 12,800 B" in why(enough, together=[["a", "b"]])
    unsplit = why(smaller, unsplit=["b"])
    assert "'b' needs 6,400 B, in pieces of 6,400 B or more" in unsplit
    assert "its 1 ranks have 6,399 B or less each" in why(smaller, pin={"b": [3]})


def test_what_was_not_found_may_be_in_fp16() -> None:
    tables = Table("a", 100, 16, 1.0), Table("b", 100, 16, 1.0)
    said = why_none_found(problem_of(tight(*tables, memory=3200), model_of("shipped")))
    assert "2 tables of 12,800 B (0.00 GiB) on 4 ranks with 12,800 B in all" in said
    assert "would fit with 6,400 B" in said


def test_wide_tables_are_not_said_to_need_wide_pieces() -> None:
    """The search cuts 260 columns at multiples of 8; a plan may at those of 4."""
    task = tight(Table("wide", 1000, 260, 1.0), memory=16_000, world_size=65)
    assert why(task) == "None"
