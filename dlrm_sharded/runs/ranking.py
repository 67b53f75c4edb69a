"""Ratios of the figures of two sharders, from pairs of runs, and which sharder is the fastest.

Figures of two runs are a pair if the runs have the same seed and were measured in the same round of
a sweep, or both without rounds. They share hosts, time and load, so their ratio says more than the
ratio of two means. Runs with the same plan differ only by noise, so their figures count as one. The
only assumption about the distribution of ratios is that their logarithms are symmetric around the
true value. The estimate is the median of all pairwise means (Hodges and Lehmann, 1963), and the
interval is that of Wilcoxon's signed-rank test in its normal approximation (Hollander, Wolfe and
Chicken, Nonparametric Statistical Methods, section 3.3).
"""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from scipy.stats import norm, spearmanr

from dlrm_sharded.files.errors import ConfigError
from dlrm_sharded.files.json_files import read_json_object
from dlrm_sharded.runs.result import RunResult
from dlrm_sharded.runs.rounds import Round

CONFIDENCE = 0.95
MIN_PAIRS = 6
"""Smallest number of pairs that gives an interval: 5 pairs all have the same sign by chance in one
of 16 cases."""

RESOLVED = 0.02
"""Relative difference for which the conclusion says how many rounds would resolve it."""

MAX_ROUNDS = 100
"""Largest number of rounds that a conclusion advises."""

MIN_CORRELATED = 5
"""Smallest number of different plans for which the correlation of cost and throughput is given."""

PAIR = ("seed", "round")
SPEED, COST = "samples_per_s", "embedding_cost_ms"


@dataclass(frozen=True, slots=True)
class PairedRatio:
    """A ratio of two figures, estimated from pairs.

    Args:
        ratio: the first figure over the second.
        low, high: ends of the interval with `CONFIDENCE`; 0 and infinity below `MIN_PAIRS`.
        num_pairs: number of pairs.
    """

    ratio: float
    low: float
    high: float
    num_pairs: int

    @property
    def is_tie(self) -> bool:
        """Whether the pairs show no difference between the two figures."""
        return self.low <= 1.0 <= self.high

    def text(self, digits: int = 3) -> str:
        """Return the ratio with its interval, or with the number of pairs if it has none."""
        if math.isinf(self.high):
            return f"{self.ratio:.{digits}f} (n = {self.num_pairs})"
        tie = " tie" if self.is_tie else ""
        return f"{self.ratio:.{digits}f} [{self.low:.{digits}f}, {self.high:.{digits}f}]{tie}"

    def pairs_to_resolve(self, difference: float) -> int:
        """Return about how many pairs would resolve a relative difference, such as 0.02.

        The interval shrinks with the square root of the number of pairs. Without an interval, it is
        the number of pairs that gives one.
        """
        if math.isinf(self.high):
            return MIN_PAIRS
        half_width = math.log(self.high / self.low) / 2
        return math.ceil(self.num_pairs * (half_width / math.log1p(difference)) ** 2)


Ratios = Mapping[str, PairedRatio | None]
"""Ratios of a sharder by name, above 1 if it is slower or costs more; None if there are no pairs.

time_over_fastest: this sharder's time per sample over the fastest one's; None for the fastest.
cost_over_fastest: this sharder's embedding cost over the fastest one's; None for the fastest.
time_over_random: this sharder's time per sample over the baseline's; None for the baseline.
"""

NO_RATIOS: Ratios = dict.fromkeys(("time_over_fastest", "cost_over_fastest", "time_over_random"))


@dataclass(frozen=True, slots=True)
class Ranking:
    """Ratios by label, from the fastest to the slowest; a round has `num_seeds` pairs.

    It is empty unless at least two sharders have a pair.
    """

    ratios: Mapping[str, Ratios]
    num_seeds: int

    @property
    def behind(self) -> dict[str, PairedRatio]:
        """The ratio `time_over_fastest` of each sharder except the fastest."""
        over = {label: found["time_over_fastest"] for label, found in self.ratios.items()}
        return {label: ratio for label, ratio in over.items() if ratio}

    def conclusion(self) -> str:
        """Return which sharder is fastest, or which tie and how many rounds would resolve it."""
        first = next(iter(self.ratios))
        ties = {label: ratio for label, ratio in self.behind.items() if ratio.is_tie}
        if not ties:
            return f"{first} is the fastest, with {100 * CONFIDENCE:.0f} % confidence in each ratio"
        has_intervals = any(math.isfinite(ratio.high) for ratio in ties.values())
        verb = "ties" if has_intervals else "has too few pairs to compare"
        said = f"{first} {verb} with {', '.join(ties)}"
        needed = [(ratio.pairs_to_resolve(RESOLVED), ratio.num_pairs) for ratio in ties.values()]
        if all(num <= num_pairs for num, num_pairs in needed):
            return f"{said}; they differ by less than {RESOLVED:.0%}, if at all"
        if (num := math.ceil(max(needed)[0] / self.num_seeds)) > MAX_ROUNDS:
            return f"{said}; the measurements are too noisy to tell them apart"
        advice = f"hydra.launcher.rounds={num} or more would resolve a difference of {RESOLVED:.0%}"
        return f"{said}; {advice}"

    def relation(self) -> str | None:
        """Return a sentence on the correlation of embedding cost and throughput, and its limits.

        Sharders with the same plan count as one. It is None below `MIN_CORRELATED` plans, or
        without intervals. The interval is that of Fisher's transformation, with the variance of
        Fieller, Hartley and Pearson (1957); a perfect order is replaced by one halfway to the next
        best.
        """
        behind = [
            (self.ratios[label]["cost_over_fastest"], over) for label, over in self.behind.items()
        ]
        plans = {(1, 1), *((cost.ratio, 1 / over.ratio) for cost, over in behind if cost)}
        if len(plans) < MIN_CORRELATED or any(math.isinf(over.high) for _, over in behind):
            return None
        found = float(spearmanr([*plans]).statistic)
        most = 1 - 6 / (len(plans) ** 3 - len(plans))
        half_width = norm.ppf((1 + CONFIDENCE) / 2) * math.sqrt(1.06 / (len(plans) - 3))
        middle = math.atanh(max(-most, min(found, most)))
        low, high = math.tanh(middle - half_width), math.tanh(middle + half_width)
        return (
            f"embedding cost and throughput of {len(plans)} plans have a rank correlation of "
            f"{found:.2f} [{low:.2f}, {high:.2f}] (Spearman); noise orders those that tie, "
            "and all tie in a model whose step exchanges or the dense part decide"
        )


NO_RANKING = Ranking({}, 0)


def paired_ratio(
    first: Sequence[float] | pl.Series, second: Sequence[float] | pl.Series
) -> PairedRatio | None:
    """Estimate the ratio of two figures from pairs; None if there are no pairs.

    Pairs in which a figure is unknown or not positive are left out.
    """
    figures = np.stack([np.asarray(first, dtype=float), np.asarray(second, dtype=float)])
    figures = figures[:, (np.isfinite(figures) & (figures > 0)).all(axis=0)]
    logs = np.log(figures[0]) - np.log(figures[1])
    if not (num := len(logs)):
        return None
    one, other = np.triu_indices(num)
    means = np.sort((logs[one] + logs[other]) / 2)
    ratio = math.exp(float(np.median(means)))
    deviation = math.sqrt(num * (num + 1) * (2 * num + 1) / 24)
    # 0.2 less gives the exact rank for 6 to 31 pairs, and at most one less for up to 200
    rank = math.floor(num * (num + 1) / 4 + norm.ppf((1 - CONFIDENCE) / 2) * deviation - 0.2)
    if num < MIN_PAIRS:
        return PairedRatio(ratio, 0.0, math.inf, num)
    return PairedRatio(ratio, math.exp(means[rank]), math.exp(means[-1 - rank]), num)


def measured(
    label: str, seed: int | None, folder: Path, found: Mapping[int, Round | RunResult]
) -> list[dict[str, Any]]:
    """Return the rows of `rank` for the measurements of the run in a folder.

    Args:
        label: the sharder, with its options.
        found: the measurements, by round.
    """
    try:
        plan = json.dumps(read_json_object(folder / "plan.json", noun="plan").get("shards"))
    except ConfigError:
        plan = str(folder)  # count it as a plan that no other run has
    return [
        {"label": label, "plan": plan, "seed": seed or 0, "round": number}
        | {name: getattr(figures, name) for name in (SPEED, COST)}
        for number, figures in found.items()
    ]


def rank(rows: Sequence[Mapping[str, Any]], *, baseline: str | None = None) -> Ranking:
    """Rank sharders by their throughput.

    The fastest sharder is the one that is faster than most others; some may lack pairs.

    Args:
        rows: see `measured`.
        baseline: label of the sharder to which `time_over_random` refers.
    """
    found = pl.DataFrame(rows, schema_overrides={SPEED: pl.Float64, COST: pl.Float64})
    speeds, costs = (_by_label(found, name) for name in (SPEED, COST))
    labels = sorted({*speeds.columns} - {*PAIR})
    over = {pair: _ratio(speeds, *pair) for pair in itertools.permutations(labels, 2)}
    won = Counter(pair[0] for pair, ratio in over.items() if ratio is not None and ratio.ratio >= 1)
    if not won:
        return NO_RANKING
    first = max(labels, key=won.__getitem__)
    behind = {label: ratio for label in labels if (ratio := over.get((first, label))) is not None}
    ratios = {
        label: {
            "time_over_fastest": behind.get(label),
            "cost_over_fastest": None if label == first else _ratio(costs, label, first),
            "time_over_random": None if label == baseline else _ratio(speeds, baseline, label),
        }
        for label in [first, *sorted(behind, key=lambda label: behind[label].ratio)]
    }
    return Ranking(ratios, found["seed"].n_unique())


def _by_label(found: pl.DataFrame, figure: str) -> pl.DataFrame:
    """Return a frame of a figure with a column for each label, and a row for each seed and round.

    Runs with the same plan get the median of their values.
    """
    return (
        found.filter(pl.col(figure) > 0)
        .with_columns(pl.col(figure).log().median().over("plan", *PAIR))
        .group_by("label", *PAIR, maintain_order=True)
        .agg(pl.col(figure).mean().exp())
        .pivot("label", index=PAIR, values=figure)
    )


def _ratio(figures: pl.DataFrame, over: str | None, under: str) -> PairedRatio | None:
    """Return the ratio of two columns of `_by_label`; None if they have no pair."""
    if over is None or not {over, under} <= {*figures.columns}:
        return None
    return paired_ratio(figures[over], figures[under])
