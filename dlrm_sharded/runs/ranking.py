"""Who is faster, by the rounds of a sweep: paired ratios with intervals, ties, and what would tell.

Two figures are a pair if runs of the same seed were measured in the same round. Runs with the same
plan differ by noise alone, so their figures count as one, and how far they differ tells the noise.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dlrm_sharded.files.errors import ConfigError
from dlrm_sharded.files.json_files import read_json_object
from dlrm_sharded.runs.paired import CONFIDENCE, PairedRatio, paired_ratio
from dlrm_sharded.runs.rounds import Round, read_rounds

TOLD_APART = 0.02
"""Difference for which the text says how many more rounds would tell it."""

Pair = tuple[int, int]
"""Seed and round."""


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """Holds what the rounds measured of a run.

    Args:
        label: the sharder, with the options that tell it from others.
        plan: identifies the plan; runs with the same plan have the same.
    """

    label: str
    seed: int
    plan: str
    rounds: Mapping[int, Round]


@dataclass(frozen=True, slots=True)
class Standing:
    """A sharder in comparison with the fastest one.

    Args:
        behind: throughput of the fastest over that of this one; None for the fastest itself.
        mean: mean throughput, in samples per second.
    """

    label: str
    mean: float
    behind: PairedRatio | None


@dataclass(frozen=True, slots=True)
class Ranking:
    """Sharders from the fastest to the slowest.

    Args:
        noise: factor within which 95 of 100 pairs of figures of the same plan lie; None if no two
            runs of a seed have the same plan.
        num_seeds: number of seeds, and so of pairs that one more round makes.
    """

    standings: tuple[Standing, ...]
    noise: float | None
    num_seeds: int

    @property
    def ties(self) -> list[str]:
        """Return who cannot be told from the fastest."""
        return [s.label for s in self.standings if s.behind is not None and s.behind.is_tie]

    def lines(self) -> list[str]:
        """Say in one line for each who is how far behind, and at the end what to do about ties."""
        first, *others = self.standings
        said = []
        for other in others:
            ratio = other.behind
            assert ratio is not None
            interval = f"{ratio.low:.3g} to {ratio.high:.3g}"
            if math.isinf(ratio.high):
                interval = f"{ratio.num_pairs} pairs, too few for an interval"
            tie = ", a tie" if ratio.is_tie else ""
            said.append(f"{first.label} {ratio.ratio:.3f} x {other.label} ({interval}){tie}")
        return [*said, self.closing]

    def clearly_behind(self, difference: float) -> set[str]:
        """Return who is behind the fastest by more than a difference such as 0.02."""
        behind = {s.label: s.behind for s in self.standings if s.behind is not None}
        return {label for label, ratio in behind.items() if ratio.low > 1 + difference}

    def is_decided(self, difference: float) -> bool:
        """Return whether everybody is clearly behind the fastest, or within the difference."""
        return all(
            s.behind is None or s.behind.low > 1 + difference or s.behind.high < 1 + difference
            for s in self.standings
        )

    @property
    def closing(self) -> str:
        """Return the line that a person can act on."""
        first, ties = self.standings[0].label, self.ties
        if not ties:
            return f"{first} is the fastest, with {100 * CONFIDENCE:.0f} % confidence in each ratio"
        return f"{first} ties with {', '.join(ties)}; {self._more_rounds()}"

    def _more_rounds(self) -> str:
        tied = [s.behind for s in self.standings if s.behind is not None and s.behind.is_tie]
        missing = max(ratio.pairs_to_tell(TOLD_APART) - ratio.num_pairs for ratio in tied)
        if missing <= 0:
            return f"they differ by less than {100 * TOLD_APART:g} %, if at all"
        rounds = math.ceil(missing / max(self.num_seeds, 1))
        plural = "" if rounds == 1 else "s"
        return f"about {rounds} more round{plural} would tell {100 * TOLD_APART:g} % apart"


def measured_run(folder: Path, label: str, seed: int) -> MeasuredRun | None:
    """Return what the rounds measured of the run in a folder; None if none did."""
    rounds = read_rounds(folder)
    if not rounds:
        return None
    try:
        plan = read_json_object(folder / "plan.json", noun="plan").get("shards")
    except ConfigError:  # the run is a plan of its own then
        plan = str(folder)
    return MeasuredRun(label, seed, json.dumps(plan, sort_keys=True), rounds)


def rank(runs: Sequence[MeasuredRun]) -> Ranking | None:
    """Rank sharders by the throughput of their runs in rounds; None without two of them."""
    figures = _pooled(runs)
    if len(figures) < 2 or not set.intersection(*(set(of_label) for of_label in figures.values())):
        return None
    common = sorted(set.intersection(*(set(of_label) for of_label in figures.values())))
    logs = {label: np.log([by_pair[pair] for pair in common]) for label, by_pair in figures.items()}
    order = sorted(figures, key=lambda label: (-float(logs[label].mean()), label))
    first = figures[order[0]]
    return Ranking(
        tuple(
            Standing(
                label,
                float(np.mean(list(figures[label].values()))),
                None if label == order[0] else _ratio(first, figures[label]),
            )
            for label in order
        ),
        noise=_noise(runs),
        num_seeds=len({run.seed for run in runs}),
    )


def _ratio(first: Mapping[Pair, float], second: Mapping[Pair, float]) -> PairedRatio:
    both = sorted(first.keys() & second.keys())
    return paired_ratio([first[pair] for pair in both], [second[pair] for pair in both])


def _pooled(runs: Sequence[MeasuredRun]) -> dict[str, dict[Pair, float]]:
    """Return the throughput by label and pair; runs with the same plan have their mean."""
    by_plan: dict[tuple[str, Pair], list[float]] = defaultdict(list)
    for run, number, found in _measurements(runs):
        by_plan[run.plan, (run.seed, number)].append(math.log(found.samples_per_s))
    by_label: dict[str, dict[Pair, list[float]]] = defaultdict(lambda: defaultdict(list))
    for run, number, _ in _measurements(runs):
        pair = run.seed, number
        by_label[run.label][pair].append(float(np.mean(by_plan[run.plan, pair])))
    return {
        label: {pair: math.exp(float(np.mean(logs))) for pair, logs in by_pair.items()}
        for label, by_pair in by_label.items()
    }


def _noise(runs: Sequence[MeasuredRun]) -> float | None:
    """Return the factor between two measurements of one plan in the same round."""
    by_plan: dict[tuple[str, Pair], list[float]] = defaultdict(list)
    for run, number, found in _measurements(runs):
        by_plan[run.plan, (run.seed, number)].append(math.log(found.samples_per_s))
    differences = [
        abs(logs[i] - logs[j])
        for logs in by_plan.values()
        for i in range(len(logs))
        for j in range(i)
    ]
    return math.exp(float(np.quantile(differences, CONFIDENCE))) if differences else None


def _measurements(runs: Sequence[MeasuredRun]) -> Iterator[tuple[MeasuredRun, int, Round]]:
    for run in runs:
        for number, found in run.rounds.items():
            yield run, number, found
