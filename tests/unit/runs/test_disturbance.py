"""Which rounds are measured again: those that other work has disturbed, once, if that helps."""

import dataclasses

import pytest

from dlrm_sharded.runs.disturbance import disturbance_text, disturbed_rounds, rounds_to_repeat
from tests.unit.runs.test_ranking import ROUND


def rounds(*, num=6, attempt=(), **changed):
    """The rounds of a run; `attempt` are those that were repeated, others change by number."""
    found = {}
    for number in range(num):
        changes = {key: values[number] for key, values in changed.items() if number in values}
        again = int(number in attempt)
        found[number] = dataclasses.replace(ROUND, round=number, attempt=again, **changes)
    return found


@pytest.mark.parametrize(
    "changed",
    [{"core_wait": {2: 0.2}}, {"step_spread": {2: 0.6}}],
    ids=["other_processes", "its_own_spread"],
)
def test_a_disturbed_round_is_repeated_once(changed):
    other = rounds()
    assert disturbed_rounds([other, rounds(**changed)]) == {2}
    assert rounds_to_repeat([other, rounds(**changed)]) == [2]
    again = rounds(attempt=[2], **changed)
    assert rounds_to_repeat([other, again]) == [2]  # all runs of it, so that pairs stay pairs
    assert rounds_to_repeat([rounds(attempt=[2]), again]) == []
    assert rounds_to_repeat([other, rounds()]) == []
    assert rounds_to_repeat([{}, {}]) == []


def test_what_is_usual_on_a_machine_disturbs_nothing():
    """The threads of a rank wait for one another, too, and steps of some models always vary."""
    usual = {"core_wait": dict.fromkeys(range(6), 0.3), "step_spread": dict.fromkeys(range(6), 2.0)}
    assert disturbed_rounds([rounds(**usual), rounds(**usual)]) == set()


def test_a_load_that_stays_is_not_waited_for():
    waits = {"core_wait": {0: 0.5, 1: 0.5, 2: 0.5}}
    first_of_both = [rounds(num=9, **waits, attempt=[0])] * 2
    assert rounds_to_repeat(first_of_both) == [1, 2]
    assert rounds_to_repeat([rounds(num=9, **waits, attempt=[0, 1])] * 2) == []
    calmer = {"core_wait": {1: 0.5, 2: 0.5}}
    assert rounds_to_repeat([rounds(num=9, **calmer, attempt=[0, 1])] * 2) == [2]


def test_nothing_is_said_of_what_was_not_disturbed():
    assert disturbance_text([rounds(), rounds()]) is None
