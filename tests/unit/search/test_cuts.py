"""Cuts of units: they add up, and their pieces fit a rank."""

from dlrm_sharded.search.cuts import UnitCut, cut_options, cut_units
from tests.unit.search.made_up import HOSTS, crowded_problem


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
