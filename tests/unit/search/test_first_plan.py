"""Cuts of units add up and fit a rank, and a first plan places all of their pieces."""

import dataclasses

import pytest

from dlrm_sharded.search.cuts import UnitCut, cut_options, cut_units
from dlrm_sharded.search.first_plan import first_plan
from tests.unit.search.made_up import (
    HOSTS,
    crowded_problem,
    searched_problem,
)
from tests.unit.search.states import is_whole, pieces, state_of_whole_units


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
