"""Rankings by rounds: what differs is told, what is the same ties, and load decides nothing."""

import dataclasses
import math

import numpy as np
import pytest

from dlrm_sharded.runs.ranking import MeasuredRun, Measurement, Ranking, rank
from dlrm_sharded.runs.rounds import Round

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
)


def sweep(
    rng: np.random.Generator,
    speeds: dict[str, float],
    *,
    num_rounds: int = 6,
    num_seeds: int = 3,
    noise: float = 0.03,
    same_plan: tuple[str, ...] = (),
    burst: float = 1.0,
) -> list[MeasuredRun]:
    """Measured runs of sharders with true speeds; a burst of load slows rounds in the middle."""
    runs = []
    for seed in range(num_seeds):
        host = rng.uniform(0.8, 1.2, num_rounds)  # what all runs of a round share
        host[num_rounds // 3 : num_rounds // 2] /= burst
        for label, speed in speeds.items():
            figures = 1000 * speed * host * np.exp(noise * rng.standard_t(4, num_rounds))
            found = {i: Measurement(float(x), 1e4 / float(x)) for i, x in enumerate(figures)}
            plan = "shared" if label in same_plan else label
            runs.append(MeasuredRun(label, seed, f"{plan} {seed}", found))
    return runs


def ranked(runs: list[MeasuredRun]) -> Ranking:
    found = rank(runs)
    assert found is not None
    return found


def test_one_sharder_under_two_names_ties() -> None:
    """In 19 of 20 sweeps at least, as the interval promises; the same plan always does."""
    rng = np.random.default_rng(0)
    ties = [bool(ranked(sweep(rng, {"a": 1.0, "b": 1.0})).ties) for _ in range(200)]
    assert sum(ties) >= 183  # 190 expected; fewer than 183 have a chance of 1 %
    for _ in range(20):
        assert ranked(sweep(rng, {"a": 1.0, "b": 1.0}, same_plan=("a", "b"))).ties


@pytest.mark.parametrize(("difference", "num_rounds"), [(0.05, 6), (0.1, 3)])
def test_a_planted_difference_is_told(difference: float, num_rounds: int) -> None:
    rng = np.random.default_rng(1)
    told = 0
    for _ in range(100):
        speeds = {"slow": 1.0, "fast": 1 + difference}
        found = ranked(sweep(rng, speeds, num_rounds=num_rounds, noise=0.02))
        told += found.standings[0].label == "fast" and not found.ties
    assert told >= 95


def test_the_lines_say_ratios_and_what_would_tell() -> None:
    rng = np.random.default_rng(3)
    runs = sweep(rng, {"dim": 1.0, "size": 1.2, "lookup": 1.2}, noise=0.05)
    *others, closing = ranked(runs).lines()
    first = ranked(runs).standings[0].label
    assert [line.split(" x ")[0].split()[0] for line in others] == [first, first]
    assert others[0].endswith("), a tie")
    assert not others[1].endswith("a tie")
    assert " x dim (1." in others[1]
    tied = ({"size", "lookup"} - {first}).pop()
    assert closing.startswith(f"{first} ties with {tied}; about ")
    assert closing.endswith(" would tell 2 % apart")
    loud = ranked(sweep(rng, {"dim": 1.0, "size": 1.0}, noise=3.0))
    assert loud.closing.endswith(
        "more than 500 more pairs would tell 2 % apart: the measurements are too noisy"
    )
    told = ranked(sweep(rng, {"dim": 1.0, "size": 1.2}))
    assert told.closing == "size is the fastest, with 95 % confidence in each ratio"


def test_what_was_not_measured_together_is_not_ranked() -> None:
    runs = sweep(np.random.default_rng(6), {"a": 1.0, "b": 1.0}, num_seeds=1)
    apart = dataclasses.replace(runs[1], seed=7)
    assert rank([runs[0], apart]) is None
    assert rank(runs[:1]) is None
    assert rank([]) is None
    few = {number: found for number, found in runs[1].measurements.items() if number < 3}
    part = dataclasses.replace(runs[1], measurements=few)
    assert not math.isfinite(ranked([runs[0], part]).standings[1].behind.high)  # type: ignore[union-attr]
