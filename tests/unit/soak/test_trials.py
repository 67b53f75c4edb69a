"""The parts of the soak tests that need no run: comparisons, tables and random plans."""

from pathlib import Path
from typing import Any

import pytest

from dlrm_sharded.runs.event_file import EventFile
from tests.soak import interruptions, outcomes, random_plans


def events(folder: Path, losses: dict[int, float], *, again: int | None = None) -> Path:
    file = EventFile(folder)
    for step, loss in losses.items():
        file.scalar("train/loss", loss, step)
        file.scalar("train/step_ms", loss * step, step)
    if again is not None:
        file.scalar("train/loss", losses[again], again)
    file.close()
    return folder


def test_equal_events(tmp_path):
    """Times may differ."""
    one, other = events(tmp_path / "one", {5: 0.5, 10: 0.25}), tmp_path / "other"
    file = EventFile(other)
    for step, loss in ((5, 0.5), (10, 0.25)):
        file.scalar("train/loss", loss, step)
        file.scalar("train/step_ms", 1.0, step)
    file.close()
    assert outcomes.event_faults(one, other) == []


def test_different_events(tmp_path):
    faults = outcomes.event_faults
    expected = events(tmp_path / "expected", {5: 0.5, 10: 0.25})
    assert faults(events(tmp_path / "a", {5: 0.5, 10: 0.125}), expected) == [
        "train/loss at 10 is [0.125] instead of [0.25]"
    ]
    (missing,) = faults(events(tmp_path / "b", {5: 0.5}), expected)
    assert missing == "2 missing values: train/loss at 10, train/step_ms at 10"
    doubled = faults(events(tmp_path / "c", {5: 0.5, 10: 0.25}, again=5), expected)
    assert doubled[0] == "1 doubled or unexpected values: train/loss at 5"
    events(tmp_path / "d", {5: 0.5, 10: 0.25})
    assert faults(events(tmp_path / "d", {15: 1.0}), expected) == ["2 event files"]


def test_table_of_interruptions():
    def done(**fields: Any) -> Any:
        expected = {"kind": "agent", "moment": "save", "lost_steps": 3, "resume_s": 2.0}
        return interruptions.Interruption(**{**expected, "faults": (), **fields})

    runs = interruptions.Runs(
        [done(), done(lost_steps=7, faults=("it hangs",)), done(moment="start", lost_steps=None)],
        {"run_0": [], "run_1": ["a step is missing"]},
    )
    text = interruptions.table(runs)
    assert "| agent | save | 2 | 1 | 7 | 2.0 |" in text
    assert "| agent | start | 1 | 1 | - | 2.0 |" in text
    assert "1 of 2 runs ended like the undisturbed one" in text
    assert runs.faults == ["agent, save: it hangs", "run_1: a step is missing"]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_random_plans_are_valid_and_repeatable(world_size):
    some = [random_plans.random_plan(world_size, seed) for seed in range(10)]
    assert some == [random_plans.random_plan(world_size, seed) for seed in range(10)]
    found = {layout for plan in some for layout in random_plans.layouts(plan)}
    assert {"columns", "several columns on a rank", "whole tables"} <= found
    assert ("rows" in found) == (world_size > 1)
