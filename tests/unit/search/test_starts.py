"""Where searches start: many kinds of cuts, first plans, replicas that fit, slices."""

import dataclasses
import itertools

import numpy as np
import pytest

from dlrm_sharded import Table, validate
from dlrm_sharded.accesses.profiles import with_profiles
from dlrm_sharded.plans.plan import ShardingPlan
from dlrm_sharded.search import starts
from dlrm_sharded.search.cuts import UnitCut, cut_options, cut_units, cuts_of
from dlrm_sharded.search.first_plan import first_plan
from dlrm_sharded.search.replication import with_replicas
from dlrm_sharded.search.slices import in_slices
from dlrm_sharded.search.state_shards import state_shards
from tests.unit.search.states import is_whole, kind_of_rows, pieces, state_of_whole_units
from tests.unit.search.synthetic import (
    HOSTS,
    crowded_problem,
    model_of,
    predicted,
    problem_of,
    searched_problem,
)
from tests.unit.synthetic import tables_of, task_of, with_memory

TASK = task_of(tables_of((3000, 32, 20.0), (50, 32, 20.0), (900, 16, 1.0)), 4, local_world_size=2)


def test_replicas_take_memory_that_others_free() -> None:
    gains = {"replica_gain_ms": np.array([1.0, 2.0, -1.0])}
    problem = dataclasses.replace(problem_of(TASK, model_of("shipped")), **gains)
    whole = [UnitCut((int(steps),)) for steps in problem.num_steps]
    cuts = with_replicas(problem, whole)
    assert [cut.kind for cut in cuts] == [2, 2, None]
    assert cuts in set(starts._start_cuts(problem, bound_ms=1e9)), "beside whole tables"

    tight_task = with_memory(TASK, TASK.table_bytes // 4 + 4)
    tight = dataclasses.replace(problem_of(tight_task, model_of("shipped")), **gains)
    assert with_replicas(tight, whole) == tuple(whole)


def test_starts_have_each_kind_of_cuts() -> None:
    """Columns alone, each kind of blocks alone, and replicas beside columns and row blocks."""
    problem = problem_of(TASK, model_of("shipped"))
    kinds = {tuple(cut.kind for cut in cuts) for cuts in starts._start_cuts(problem, 1e-3)}
    assert {(None,) * 3, *((kind,) * 3 for kind in range(len(problem.blocks)))} <= kinds
    assert {*itertools.chain.from_iterable(kinds)} == {None, *range(len(problem.blocks))}
    assert all(map(is_whole, starts._first_plans(problem, 1e-3)))


def test_cuts_of_a_state() -> None:
    problem = problem_of(TASK, model_of("shipped"))
    state = state_of_whole_units(problem)
    state.set_width(2, next(iter(state.widths[2])), 0)
    state.set_group(2, problem.blocks[1].groups[1])
    assert cuts_of(state) == (UnitCut((8,)), UnitCut((8,)), UnitCut(kind=1))


def test_row_blocks_over_all_ranks_come_before_those_of_a_host() -> None:
    """They need memory on all ranks, and those of a host may lie on all ranks, too."""
    task = task_of(tables_of((1000, 8, 1.0), (4000, 8, 1.0)), 4, 45_000, local_world_size=2)
    problem = problem_of(task, model_of("shipped"))
    of_a_host, over_all = kind_of_rows(problem, 2), kind_of_rows(problem, 4)
    state = first_plan(problem, [UnitCut(kind=of_a_host), UnitCut(kind=over_all)])
    assert state is not None
    assert [problem.groups[group].kind for group in state.group.tolist()] == [over_all, over_all]


@pytest.mark.parametrize("columns", [32, 64, 128])
def test_slices_cost_what_the_model_predicts(columns: int) -> None:
    """On one rank nothing is exchanged, so the objective is exact."""
    tables = (Table("wide", 500, 384, 1.0), Table("busy", 500, 32, 50.0))
    task, model = with_profiles(task_of(tables, 1, 10**9, 512, device="cuda")), model_of("warps")
    state = state_of_whole_units(problem_of(task, model))
    sliced = in_slices(state, columns)
    assert sliced is not None
    assert in_slices(state, 384) is None, "nothing is wider"

    shards = state_shards(sliced)

    validate(ShardingPlan(1, shards), task)
    widths = [shard.num_cols for shard in shards if shard.table == "wide"]
    assert widths == [columns] * (384 // columns)
    cost_ms = predicted(shards, task, model).cost_ms
    np.testing.assert_allclose(sliced.objective_ms, cost_ms, rtol=1e-9)
    assert sliced.objective_ms != state.objective_ms


@pytest.mark.parametrize("hosts", HOSTS, ids=lambda hosts: f"{hosts[0]}x{hosts[1]}")
@pytest.mark.parametrize("full", [0.2, 0.8, 0.95])
def test_places_everything(hosts: tuple[int, int], full: float) -> None:
    found = 0
    for seed in range(10):
        problem = crowded_problem(seed, hosts, full)
        for target in (0.0, 1.0, 100.0):
            mean_ms = float(problem.load[problem.whole_shape].sum()) / problem.world_size
            cuts = cut_units(problem, target * mean_ms)
            state = first_plan(problem, cuts)
            if state is not None:
                found += 1
                assert is_whole(state)
                assert state.log == []
    assert found >= 27


def test_the_unit_of_time_does_not_matter() -> None:
    """Loads are weighed by their size on a mean rank, however short the times are."""
    for seed in range(6):
        problem = searched_problem(seed)
        blocks = [dataclasses.replace(of, load=2.0**10 * of.load) for of in problem.blocks]
        slower = dataclasses.replace(problem, load=2.0**10 * problem.load, blocks=tuple(blocks))
        assert pieces(state_of_whole_units(problem)) == pieces(state_of_whole_units(slower))


def test_cuts_add_up_and_fit_their_target() -> None:
    for seed in range(20):
        problem = crowded_problem(seed, HOSTS[seed % len(HOSTS)], 0.3)
        for target_ms in (0.0, 0.5, 5.0, 1e9):
            for unit, cut in enumerate(cut_units(problem, target_ms)):
                costs = {o.cut: o.processing_ms for o in cut_options(problem, unit)}
                assert costs.get(cut, 0.0) <= max(target_ms, min(costs.values(), default=0.0))
                if cut.kind is not None:
                    assert problem.blocks[cut.kind].possible[unit]
                    continue
                assert sum(cut.widths) == problem.num_steps[unit]
                assert max(cut.widths) - min(cut.widths) <= 1
                assert len(cut.widths) <= problem.world_size
        whole = [UnitCut((int(steps),)) for steps in problem.num_steps]
        fits = problem.size_bytes[problem.whole_shape] <= problem.capacity_bytes.max()
        assert [c for c, fit in zip(cut_units(problem, 1e9), fits, strict=True) if fit] == [
            c for c, fit in zip(whole, fits, strict=True) if fit
        ]


def test_options_fit_the_largest_rank() -> None:
    for seed in range(20):
        problem = crowded_problem(seed, HOSTS[seed % len(HOSTS)], 0.9)
        for unit in range(problem.num_units):
            for option in cut_options(problem, unit):
                if option.cut.kind is None:
                    shapes = [problem.shape(unit, width) for width in option.cut.widths]
                    size = problem.size_bytes[shapes]
                else:
                    size = problem.blocks[option.cut.kind].size_bytes[unit]
                assert size.max() <= problem.capacity_bytes.max()
                assert option.processing_ms > 0
