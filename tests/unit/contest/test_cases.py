"""Cases in processes: what has ended is kept, what has changed is planned again."""

import dataclasses
import json

import pytest

from dlrm_sharded.contest.cases import CASES, PLANS, plan_path, run_cases
from dlrm_sharded.files.errors import InfeasibleTaskError
from dlrm_sharded.plans.plan import read_plan
from tests.unit.contest.entries import TASK, case_of


def run(cases, out, limit_s=60.0):
    return run_cases(cases, out, limit_s=limit_s, num_workers=2)


def test_an_entry_says_what_came_of_a_case(tmp_path):
    [entry] = run([case_of(rank=1)], tmp_path)
    assert (entry.outcome.cost.cost_ms, entry.outcome.error) == (28.0, None)
    assert entry.plan.bytes_by_rank(TASK.topology) == [0, TASK.table_bytes]
    assert read_plan(plan_path(tmp_path, "t", "a")).shards == entry.outcome.shards
    assert run([case_of(rank=1)], tmp_path)[0].outcome == entry.outcome


def test_a_folder_of_an_earlier_version_is_planned_again(tmp_path, caplog):
    (tmp_path / CASES).write_text(json.dumps({"key": case_of().key(), "entry": {}}))
    with caplog.at_level("INFO"):
        run([case_of()], tmp_path)
    assert "line 1 (damaged)" in caplog.text
    assert "1 case planned" in caplog.text


@pytest.mark.parametrize(
    ("error", "message"),
    [(InfeasibleTaskError("no memory"), "no memory"), (KeyError("bug"), "KeyError: 'bug'")],
    ids=["refused", "broken"],
)
def test_a_sharder_that_fails_is_an_entry(tmp_path, error, message):
    failed, solved = run([case_of(error=error), case_of(sharder="b")], tmp_path)
    assert (failed.outcome.error, solved.outcome.error) == (message, None)
    assert failed.outcome.cost is None


def test_the_same_command_goes_on(tmp_path, caplog):
    """A kill in the middle of a line costs that case alone."""
    cases = [case_of(sharder=name) for name in "abc"]
    before = run(cases, tmp_path)
    path = tmp_path / CASES
    path.write_bytes(path.read_bytes()[:-20])
    with caplog.at_level("INFO"):
        again = run(cases, tmp_path)
    assert "reusing 2 of 3 cases" in caplog.text
    assert "1 of 3 lines of the journal of cases" in caplog.text
    assert "1 case planned" in caplog.text
    assert [entry.outcome for entry in again[:2]] == [entry.outcome for entry in before[:2]]
    assert len(path.read_bytes().splitlines()) == 4


@pytest.mark.parametrize(
    "changed",
    [
        case_of(task=dataclasses.replace(TASK, batch_size=2048)),
        case_of(rank=1),
        dataclasses.replace(case_of(), costs_digest="others"),
    ],
    ids=["task", "option", "costs"],
)
def test_what_has_changed_is_planned_again(tmp_path, changed, caplog):
    cases = [case_of(), case_of(sharder="b"), case_of(sharder="c")]
    run(cases, tmp_path)
    plan_path(tmp_path, "t", "c").unlink()
    with caplog.at_level("INFO"):
        run([changed, *cases[1:]], tmp_path)
    assert "reusing 1 of 3 cases" in caplog.text
    assert plan_path(tmp_path, "t", "c").exists(), "a plan that is gone is made again"


def test_a_changed_class_is_planned_again(tmp_path, monkeypatch):
    key = case_of().key()
    source = tmp_path / "edited.py"
    source.write_text("class AllOn: ...")
    monkeypatch.setattr("inspect.getsourcefile", lambda of: str(source))
    assert case_of().key() != key


def test_names_that_differ_have_different_paths(tmp_path):
    names = ["a b", "a_b", "a/b", "search;pin={t: [0]}", "search;pin={t: [1]}"]
    paths = {plan_path(tmp_path, "t", name) for name in names}
    assert len(paths) == len(names)
    assert {path.parent for path in paths} == {tmp_path / PLANS / "t"}


def test_more_time_is_another_chance(tmp_path, caplog):
    failing = case_of(error=KeyError("bug"))
    run([failing], tmp_path, limit_s=5.0)
    with caplog.at_level("INFO"):
        run([failing], tmp_path, limit_s=4.0)
        assert "reusing 1 of 1 case" in caplog.text
        caplog.clear()
        run([failing], tmp_path, limit_s=6.0)
        assert "reusing" not in caplog.text


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / PLANS).write_text("a file")
    with pytest.raises(OSError, match=str(tmp_path)):
        run([case_of()], tmp_path)
