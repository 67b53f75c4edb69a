"""Which rounds are measured again: those that other work has disturbed, once."""

import dataclasses

import pytest

from dlrm_sharded.ranks.gpus import GpuState, GpuStates
from dlrm_sharded.runs.rounds import (
    Round,
    disturbance_text,
    disturbed_rounds,
    read_rounds,
    rounds_file,
    rounds_to_repeat,
)

FAST = GpuStates(GpuState(1980, 2619, 0), GpuState(1980, 2619, 0))
HOT = GpuStates(GpuState(1980, 2619, 0), GpuState(1980, 2619, 0x20))
ROUND = Round(
    round=0,
    place=0,
    embedding_cost_ms=1.0,
    spread=0.1,
    step_ms=1.0,
    samples_per_s=1.0,
    step_spread=0.1,
    hosts={"a": 0.5},
    began_s=0.0,
    core_wait=0.0,
    seconds=1.0,
    gpus=(FAST, FAST),
)


def rounds(*, attempt=(), **changed):
    """The rounds of a run; `attempt` are those that were repeated, others change by number."""
    found = {}
    for number in range(6):
        changes = {key: values[number] for key, values in changed.items() if number in values}
        again = int(number in attempt)
        found[number] = dataclasses.replace(ROUND, round=number, attempt=again, **changes)
    return found


@pytest.mark.parametrize(
    "changed",
    [{"core_wait": {2: 0.2}}, {"step_spread": {2: 0.6}}, {"gpus": {2: (FAST, HOT)}}],
    ids=["other_processes", "its_own_spread", "a_gpu"],
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
    text = disturbance_text([rounds(attempt=[2]), again])
    assert text.startswith("6 rounds; measured again: 1; disturbed by other work: 1 (load that is")


def test_what_is_usual_on_a_machine_disturbs_nothing():
    """The threads of a rank wait for one another, too, and steps of some models always vary."""
    usual = {"core_wait": dict.fromkeys(range(6), 0.3), "step_spread": dict.fromkeys(range(6), 2.0)}
    assert disturbed_rounds([rounds(**usual), rounds(**usual)]) == set()
    text = disturbance_text([rounds(**usual), rounds(core_wait={1: 0.1})])
    assert "by other work: 0 (load that is equal in all does not count)" in text
    assert text.endswith("own work: 0.50; others had the cores for 0% to 30% of a measurement")


def test_what_is_written_is_read(tmp_path):
    rounds_file(tmp_path).append(dataclasses.asdict(ROUND))
    assert read_rounds(tmp_path) == {0: ROUND}
