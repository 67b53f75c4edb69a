"""Rebuilds of a few ranks, with new cuts of what is costliest there."""

import numpy as np
import pytest

from dlrm_sharded.search.large_neighborhood import Rebuilder
from tests.unit.search.made_up import searched_problem
from tests.unit.search.states import is_whole, state_of_whole_units


@pytest.mark.parametrize("splits", [True, False])
def test_rebuilds_may_cut_what_is_whole(splits: bool) -> None:
    """Many of them do, unless the search may split nothing."""
    problem = searched_problem(1, full=0.3)
    num_cut = 0
    for seed in range(20):
        state = state_of_whole_units(problem)
        if Rebuilder(state, np.random.default_rng(seed), splits=splits).rebuild():
            assert is_whole(state)
            num_cut += any(len(widths) != 1 for widths in state.widths)
    assert num_cut >= 5 if splits else num_cut == 0
