"""Ratios of pairs: what differs is found, what is the same ties, and load decides nothing."""

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from dlrm_sharded.runs.ranking import (
    MIN_PAIRS,
    NO_RANKING,
    PairedRatio,
    Ranking,
    measured,
    paired_ratio,
    rank,
)
from tests.unit.runs.test_rounds import ROUND

TRUE = 1.05
Draw = Callable[[np.random.Generator, int], NDArray[np.float64]]
DRAWS: dict[str, Draw] = {
    "normal": lambda rng, num: rng.normal(size=num),
    "heavy_tails": lambda rng, num: rng.standard_t(2, size=num),
    "uniform": lambda rng, num: rng.uniform(-1, 1, size=num),
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
@pytest.mark.parametrize("num", [6, 15, 45])
def test_the_interval_has_the_true_ratio_in_19_of_20_cases(draw: Draw, num: int) -> None:
    rng, num_cases = np.random.default_rng(0), 1500
    found = [
        paired_ratio(TRUE * np.exp(0.03 * draw(rng, num)), np.ones(num)) for _ in range(num_cases)
    ]
    share = sum(case.low <= TRUE <= case.high for case in found if case) / num_cases
    assert 0.935 <= share <= 0.99


@pytest.mark.parametrize(("num", "rank"), [(6, 0), (8, 3), (12, 13), (16, 29), (25, 89), (30, 137)])
def test_the_interval_ends_at_the_ranks_of_wilcoxons_table(num: int, rank: int) -> None:
    """Critical values of signed ranks, two-sided 0.05."""
    logs = np.random.default_rng(num).normal(size=num)
    one, other = np.triu_indices(num)
    means = np.sort((logs[one] + logs[other]) / 2)
    found = paired_ratio(np.exp(logs), np.ones(num))
    assert found is not None
    assert np.log([found.low, found.high]) == pytest.approx([means[rank], means[-1 - rank]])


def test_what_disturbs_both_of_a_pair_does_not_count() -> None:
    rng = np.random.default_rng(1)
    disturbed, noise = rng.uniform(1.0, 5.0, 12), rng.normal(0.0, 0.01, 12)
    found = paired_ratio(TRUE * disturbed * np.exp(noise), disturbed)
    other = paired_ratio(disturbed, TRUE * disturbed * np.exp(noise))
    assert found is not None
    assert other is not None
    assert found.ratio == pytest.approx(TRUE, abs=0.01)
    assert 1.0 < found.low < found.high < 1.1
    assert (found.ratio, found.low, found.high) == pytest.approx(
        (1 / other.ratio, 1 / other.high, 1 / other.low)
    )
    assert found.text() == f"{found.ratio:.3f} [{found.low:.3f}, {found.high:.3f}]"


def test_five_pairs_are_too_few_for_this_confidence() -> None:
    found = paired_ratio([2.0] * 5, [1.0] * 5)
    assert found == PairedRatio(2.0, 0.0, math.inf, 5)
    assert found.is_tie
    assert found.pairs_to_resolve(0.02) == MIN_PAIRS == 6
    assert found.text() == "2.000 (n = 5)"


def test_one_wild_pair_does_not_decide_and_unknown_ones_do_not_count() -> None:
    found = paired_ratio(
        [1.0, 1.01, 0.99, 1.0, 1.02, 0.98, 1.0, 100.0, math.nan, 0.0, math.inf], [1.0] * 11
    )
    assert found is not None
    assert found.ratio == pytest.approx(1.0, abs=0.02)
    assert found.is_tie
    assert found.num_pairs == 8
    assert paired_ratio([0.0, math.nan], [1.0, 1.0]) is None


@pytest.mark.parametrize(("difference", "pairs"), [(0.041, 10), (0.02, 40)])
def test_pairs_that_would_resolve_a_difference(difference: float, pairs: int) -> None:
    assert PairedRatio(1.0, 1 / 1.04, 1.04, 10).pairs_to_resolve(difference) == pairs


def sweep(
    rng: np.random.Generator,
    speeds: dict[str, float],
    *,
    num_rounds: int = 6,
    num_seeds: int = 3,
    noise: float = 0.03,
    same_plan: tuple[str, ...] = (),
) -> list[dict[str, Any]]:
    """What was measured of sharders with true speeds, on hosts whose speed changes."""
    rows = []
    for seed in range(num_seeds):
        host = rng.uniform(0.8, 1.2, num_rounds)  # what all runs of a round share
        for label, speed in speeds.items():
            figures = 1000 * speed * host * np.exp(noise * rng.standard_t(4, num_rounds))
            plan = "shared" if label in same_plan else label
            rows += [
                {"label": label, "plan": f"{plan} {seed}", "seed": seed, "round": number}
                | {"samples_per_s": float(figure), "embedding_cost_ms": 1e4 / float(figure)}
                for number, figure in enumerate(figures)
            ]
    return rows


def test_one_sharder_under_two_names_ties() -> None:
    """In 19 of 20 sweeps at least, as the interval promises; the same plan always does."""
    rng = np.random.default_rng(0)
    ties = [rank(sweep(rng, {"a": 1.0, "b": 1.0})).behind for _ in range(100)]
    assert sum(ratio.is_tie for behind in ties for ratio in behind.values()) >= 90
    found = rank(sweep(rng, {"a": 1.0, "b": 1.0}, same_plan=("a", "b")))
    assert found.conclusion() == "a ties with b; they differ by less than 2%, if at all"


@pytest.mark.parametrize(("difference", "num_rounds"), [(0.05, 6), (0.1, 3)])
def test_a_planted_difference_is_found_fast(difference: float, num_rounds: int) -> None:
    rng = np.random.default_rng(1)
    found_fast = 0
    for _ in range(60):
        speeds = {"slow": 1.0, "fast": 1 + difference}
        found = rank(sweep(rng, speeds, num_rounds=num_rounds, noise=0.02))
        found_fast += found.conclusion().startswith("fast is the fastest, with 95 % confidence")
    assert found_fast >= 56


def test_all_are_compared_with_the_fastest_and_the_baseline() -> None:
    rng = np.random.default_rng(3)
    rows = sweep(rng, {"random": 1.0, "dim": 1.1, "size": 2.0, "lookup": 2.0}, noise=0.001)
    found = rank(rows, baseline="random")
    first, second, *others = found.ratios
    assert {first, second} == {"size", "lookup"}
    assert others == ["dim", "random"]
    ratios = found.ratios["dim"]
    values = [ratio and ratio.ratio for ratio in ratios.values()]
    assert values == pytest.approx([2 / 1.1, 2 / 1.1, 1 / 1.1], rel=0.01)
    assert found.ratios[first]["time_over_fastest"] is None
    assert found.ratios["random"]["time_over_random"] is None


@pytest.mark.parametrize(
    ("width", "advice"),
    [
        (1.04, "hydra.launcher.rounds=10 or more would resolve a difference of 2%"),
        (1.15, "the measurements are too noisy to tell them apart"),
    ],
)
def test_a_tie_says_how_many_rounds_would_decide(width: float, advice: str) -> None:
    tie = {"time_over_fastest": PairedRatio(1.0, 1 / width, width, 10)}
    found = Ranking({"a": {"time_over_fastest": None}, "b": tie}, num_seeds=4)
    assert found.conclusion() == f"a ties with b; {advice}"


def test_what_was_not_measured_together_is_not_rank() -> None:
    rows = sweep(np.random.default_rng(6), {"a": 1.0, "b": 1.0}, num_seeds=1)
    apart = [row | {"seed": 7} if row["label"] == "b" else row for row in rows]
    for others in (apart, rows[:6]):
        assert rank(others) == NO_RANKING
        assert rank(others).relation() is None
    part = rank([row for row in rows if row["label"] == "a" or row["round"] < 3])
    assert {ratio.num_pairs for ratio in part.behind.values()} == {3}


def test_a_run_without_a_plan_is_like_no_other(tmp_path: Path) -> None:
    for name, text in (("a", '{"shards": [1]}'), ("b", '{"shards": [1]}'), ("c", "{")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "plan.json").write_text(text)
    rows = [measured("x", None, tmp_path / name, {4: ROUND})[0] for name in "abc"]
    assert rows[0] == rows[1]
    assert rows[2]["plan"] != rows[0]["plan"]
    assert (rows[0]["seed"], rows[0]["round"], rows[0]["samples_per_s"]) == (0, 4, 1.0)


@pytest.mark.parametrize(("order", "low", "high"), [(1, -1.0, -0.93), (0, -0.7, 0.7)])
def test_cost_and_throughput_are_related_as_far_as_they_are(
    order: int, low: float, high: float
) -> None:
    """The interval contains the correlation of the ranks, and none is certain."""
    rng = np.random.default_rng(0)
    costs = dict(zip("abcdefgh", np.linspace(1.0, 2.0, 8), strict=True))
    speeds = costs if order else dict.fromkeys(costs, 1.0)
    rows = sweep(rng, {label: 1 / speed for label, speed in speeds.items()}, num_seeds=1)
    for row in rows:
        row["embedding_cost_ms"] = costs[row["label"]] * float(np.exp(0.001 * rng.normal()))
    text = rank(rows).relation()
    assert text is not None
    found = [float(number) for number in re.findall(r"-?\d\.\d\d", text)]
    assert low <= found[0] <= high
    assert -1.0 <= found[1] <= found[0] <= found[2] <= 1.0
    assert found[2] - found[1] > 0.02
    assert "of 8 plans" in text


def test_few_plans_or_few_rounds_say_nothing_of_the_relation() -> None:
    rng, speeds = np.random.default_rng(0), dict.fromkeys("abcde", 1.0)
    assert rank(sweep(rng, speeds, num_seeds=1)).relation()
    assert rank(sweep(rng, speeds, num_seeds=1, num_rounds=5)).relation() is None
    assert rank(sweep(rng, speeds, num_seeds=1, same_plan=("a", "b"))).relation() is None
