"""Scores of synthetic entries: means are of tasks in common, and no failure is hidden."""

import math
from pathlib import Path

import pytest

from dlrm_sharded.contest.cases import Measurement, Setting
from dlrm_sharded.contest.scores import by_plan, scores
from dlrm_sharded.contest.summary import failures, notes, plot_scores, score_table, verdict
from dlrm_sharded.plans.plan_cost import PlanCost
from tests.unit.contest.entries import cost_of, entry_of


def entries_of(**costs):
    return [
        entry_of(f"t{number}", sharder, ms)
        for sharder, of_tasks in costs.items()
        for number, ms in enumerate(of_tasks)
    ]


def scored(entries, reference, measurements=None):
    return scores(by_plan(entries, measurements or {}, reference), margin=1e-3)


def ratio_of(score):
    return score.ratios["predicted"] and score.ratios["predicted"].ratio


def first_note(entries):
    setting = Setting(Path("out"), "a", 1e-3, 1, 9.0, "csv")
    return notes(scored(entries, "a"), by_plan(entries, {}, "a"), setting)[0]


def test_ratios_are_of_the_tasks_that_all_solve():
    found = scored(entries_of(a=[2, 2, 9, None], b=[1, 4, None, 1]), "a")
    assert [(one.num_solved, one.plans.height) for one in found] == [(3, 4), (3, 4)]
    [reference, other] = found
    assert (ratio_of(reference), reference.tallies["predicted"]) == (1.0, (0, 3, 0))
    assert ratio_of(other) == pytest.approx(math.sqrt(0.5 * 2))
    assert other.ratios["predicted"].num_pairs == 2
    assert other.tallies["predicted"] == (2, 0, 2)  # a plan where the other one has none is a win


def test_a_sharder_without_any_plan_empties_no_mean():
    entries = entries_of(a=[2, 2], b=[1, 1], c=[None, None])
    found = scored(entries, "a")
    assert [*map(ratio_of, found)] == [1.0, 0.5, None]
    assert found[2].tallies["predicted"] == (0, 0, 2)
    text = first_note(entries)
    assert "tasks that all of them but c, without any plan, solve (2 of 2)" in text


def test_no_task_in_common():
    found = scored(entries_of(a=[2, None], b=[None, 1]), "a")
    assert [*map(ratio_of, found)] == [None, None]
    assert [row[1:4] for row in score_table(found, "a").rows] == [
        ["1/2", "reference", None],
        ["1/2", None, "1/0/1"],
    ]


@pytest.mark.parametrize(
    ("ms", "expected"), [(0.5, (1, 0, 0)), (0.9995, (0, 1, 0)), (1.002, (0, 0, 1))], ids=str
)
def test_a_margin_is_a_tie(ms, expected):
    assert scored(entries_of(a=[1.0], b=[ms]), "a")[1].tallies["predicted"] == expected


def test_the_gap_is_from_the_best_bound_of_any_sharder():
    """A bound above a plan's cost is of plans in another precision."""
    cost = PlanCost(cost_of(2.0).per_rank, excess_ms=0.5)
    a = entry_of("t", "a", 2.0, lower_bound_ms=1.6, cost=cost)
    b = entry_of("t", "b", 3.0, lower_bound_ms=1.0)
    for other in (b, entry_of("t", "b", 3.0, lower_bound_ms=2.5)):
        assert by_plan([a, other], {}, "a")["gap"].to_list() == pytest.approx([0.25, 0.875])


def test_measured_costs_decide_by_rounds():
    """Six rounds that agree distinguish two plans; rounds that disagree do not."""
    rounds = {"a": (2.0, 3.0, 2.0, 2.1, 2.0, 2.5)}
    apart = rounds | {"b": tuple(ms / 2 for ms in rounds["a"])}
    mixed = rounds | {"b": (3.0, 2.0, 2.1, 2.0, 2.5, 2.0)}
    costs = {"a": cost_of(2.0), "b": cost_of(1.0)}
    measured = {"t0": Measurement(apart, costs), "t1": Measurement(mixed, costs)}
    [_, other] = scored(entries_of(a=[1, 1], b=[1, 1]), "a", measured)
    assert other.tallies["measured"] == (1, 1, 0)
    assert scored(entries_of(a=[1, 1], b=[1, 1]), "b", measured)[0].tallies["measured"] == (0, 1, 1)
    assert other.ratios["measured"].ratio == pytest.approx(0.5)
    assert ratio_of(other) == 1.0
    assert "measured / a [95 %]" in score_table([other], "a").text()


@pytest.mark.parametrize(
    ("costs", "expected"),
    [
        (
            [1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
            "the predicted cost of b over a's is 0.5000 [0.5000, 0.5000]",
        ),
        ([1.0, 6.0, 3.0, 12.0, 5.0, 6.0], "] tie"),
        ([3.0, 6.0, 9.0, 12.0, 15.0, 18.0], "none of them is cheaper than a"),
    ],
    ids=["better", "perhaps", "worse"],
)
def test_the_result_in_a_sentence(costs, expected):
    found = scored(entries_of(a=[2.0, 4.0, 6.0, 8.0, 10.0, 12.0], b=costs), "a")
    assert expected in verdict(found, "a")


def test_cases_without_a_plan_are_named():
    lines = failures(by_plan(entries_of(a=[1, None, None], b=[None, None, 1]), {}, "a"))
    assert lines == [f"no plan: {of}: no memory" for of in ("t1, a", "t2, a", "t0, b", "t1, b")]


def test_the_plot_has_each_interval():
    found = scored(entries_of(a=[1, 2, 3, 4, 5, 6], b=[2, 3, 4, 5, 6, 7], c=[None] * 6), "a")
    figure = plot_scores(found, "a")
    assert figure.get_supxlabel().startswith("predicted cost / a's, ")
    axes = figure.axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == [
        *("a (6/6)", "b (6/6)", "c (0/6)")
    ]
    ratios = [one.ratios["predicted"] for one in found[:2]]
    ends = [tuple(line[:, 0]) for bars in axes.collections for line in bars.get_segments()]
    assert ends == [pytest.approx((one.low, one.high)) for one in ratios]
