"""First plans: everything is placed, within memory and constraints."""

import pytest

from dlrm_sharded.search.cuts import cut_units
from dlrm_sharded.search.first_plan import first_plan
from tests.unit.search.made_up import HOSTS, crowded_problem
from tests.unit.search.states import is_whole


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
