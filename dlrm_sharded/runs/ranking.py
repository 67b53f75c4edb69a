"""Who is faster: paired ratios with intervals, ties, and what would tell those apart that tie.

Two figures are a pair if runs of the same seed were measured in the same round of a sweep. Of runs
without rounds, those of the same seed are pairs. Runs with the same plan differ by noise alone, so
their figures count as one, and how far they differ tells the noise.
"""

from __future__ import annotations

import itertools
import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dlrm_sharded.files.errors import ConfigError
from dlrm_sharded.files.json_files import read_json_object
from dlrm_sharded.runs.disturbance import Rounds
from dlrm_sharded.runs.paired import CONFIDENCE, PairedRatio, least_pairs, paired_ratio

TOLD_APART = 0.02
"""Difference for which the text says how many more rounds would tell it."""

MAX_MISSING = 500
"""Number of further pairs beyond which nobody would measure them."""

Pair = tuple[int, int]
"""Seed and round."""

Figures = Mapping[str, Mapping[Pair, float]]
"""A figure by label and pair."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """Figures of a run that are compared: samples per second, and the embedding cost in ms."""

    samples_per_s: float
    cost_ms: float


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """Holds what was measured of a run.

    Args:
        label: the sharder, with the options that tell it from others.
        plan: identifies the plan; runs with the same plan have the same.
        measurements: by round; of a run without rounds, the one under 0.
    """

    label: str
    seed: int
    plan: str
    measurements: Mapping[int, Measurement]


@dataclass(frozen=True, slots=True)
class Standing:
    """A sharder in comparison with the fastest one, and with the baseline.

    Args:
        behind: throughput of the fastest over that of this one; None for the fastest itself.
        cost: embedding cost of this one over that of the fastest; None for the fastest itself.
        gain: throughput of this one over that of the baseline; None for the baseline itself, and
            where there is none.
    """

    label: str
    behind: PairedRatio | None
    cost: PairedRatio | None
    gain: PairedRatio | None


@dataclass(frozen=True, slots=True)
class Ranking:
    """Sharders from the fastest to the slowest.

    Args:
        noise: factor within which 95 of 100 pairs of figures of the same plan lie; None if no two
            runs of a seed have the same plan.
        num_seeds: number of seeds, and so of pairs that one more round makes.
        has_rounds: whether the runs were measured in rounds.
        disturbance: which rounds other work has disturbed, as a text; None for none.
    """

    standings: tuple[Standing, ...]
    noise: float | None
    num_seeds: int
    has_rounds: bool
    disturbance: str | None = None

    @property
    def ties(self) -> list[str]:
        """Return who cannot be told from the fastest."""
        return [s.label for s in self.standings if s.behind is not None and s.behind.is_tie]

    def lines(self) -> list[str]:
        """Say in one line for each who is how far behind, and at the end what to do about ties."""
        first, *others = self.standings
        said = [
            f"{first.label} {ratio_text(other.behind)[0]} x {other.label} "
            f"({ratio_text(other.behind)[1]}){', a tie' if other.behind.is_tie else ''}"
            for other in others
            if other.behind is not None
        ]
        if self.noise is not None:
            said.append(
                f"noise: throughputs of one plan differ by up to {100 * (self.noise - 1):.1f} % "
                f"in {100 * CONFIDENCE:.0f} of 100 pairs"
            )
        if self.disturbance is not None:
            said.append(self.disturbance)
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
        return f"{first} ties with {', '.join(ties)}; {self._what_would_tell()}"

    def _what_would_tell(self) -> str:
        tied = [s.behind for s in self.standings if s.behind is not None and s.behind.is_tie]
        missing = max(ratio.pairs_to_tell(TOLD_APART) - ratio.num_pairs for ratio in tied)
        if missing <= 0:
            return f"they differ by less than {100 * TOLD_APART:g} %, if at all"
        told = f"would tell {100 * TOLD_APART:g} % apart"
        if missing > MAX_MISSING:
            return f"more than {MAX_MISSING} more pairs {told}: the measurements are too noisy"
        about = "about"
        if any(math.isinf(ratio.high) for ratio in tied):
            about, told = "at least", "would give intervals"
        rounds = math.ceil(missing / max(self.num_seeds, 1))
        if self.has_rounds:
            return f"{about} {rounds} more round{'' if rounds == 1 else 's'} {told}"
        seeds = f"{missing} more seed{'' if missing == 1 else 's'}"
        rounds = math.ceil(least_pairs(CONFIDENCE) / max(self.num_seeds, 1))
        return f"{about} {seeds} {told}; hydra.launcher.rounds={rounds} measures them side by side"


def ratio_text(ratio: PairedRatio) -> tuple[str, str]:
    """Return a ratio and its interval, as texts."""
    if math.isinf(ratio.high):
        plural = "" if ratio.num_pairs == 1 else "s"
        return f"{ratio.ratio:.3f}", f"{ratio.num_pairs} pair{plural}, too few for an interval"
    return f"{ratio.ratio:.3f}", f"{ratio.low:.3g} to {ratio.high:.3g}"


def measured_in_rounds(folder: Path, label: str, seed: int, rounds: Rounds) -> MeasuredRun:
    """Return what rounds have measured of the run in a folder."""
    measurements = {
        number: Measurement(found.samples_per_s, found.embedding_cost_ms)
        for number, found in rounds.items()
    }
    return MeasuredRun(label, seed, plan_id(folder), measurements)


def plan_id(folder: Path) -> str:
    """Return what identifies the plan of a run; without a plan, the run is one of its own."""
    try:
        shards = read_json_object(folder / "plan.json", noun="plan").get("shards")
    except ConfigError:
        return str(folder)
    return json.dumps(shards, sort_keys=True)


def rank(
    runs: Sequence[MeasuredRun], *, baseline: str | None = None, has_rounds: bool = True
) -> Ranking | None:
    """Rank sharders by their throughput; None without two that have a pair.

    Args:
        baseline: label of the sharder that all gains are over.
    """
    speeds = _pooled(runs, lambda found: found.samples_per_s)
    first = _fastest(speeds)
    if first is None:
        return None
    costs = _pooled(runs, lambda found: found.cost_ms)
    standings = [
        Standing(
            label,
            behind=None if label == first else _ratio(speeds, first, label),
            cost=None if label == first else _ratio(costs, label, first),
            gain=None if label == baseline else _ratio(speeds, label, baseline),
        )
        for label in speeds
    ]
    compared = [s for s in standings if s.label == first or s.behind is not None]
    if len(compared) < 2:
        return None
    compared.sort(key=lambda s: (0.0 if s.behind is None else s.behind.ratio, s.label))
    return Ranking(
        tuple(sorted(compared, key=lambda s: s.label != first)),
        noise=_noise(runs),
        num_seeds=len({run.seed for run in runs}),
        has_rounds=has_rounds,
    )


def _fastest(speeds: Figures) -> str | None:
    """Return who is the fastest: first by means over what each pair shares, then by pairs.

    Not everybody need have all pairs.
    """
    by_pair: dict[Pair, list[float]] = defaultdict(list)
    for figures in speeds.values():
        for pair, figure in figures.items():
            by_pair[pair].append(math.log(figure))
    centered = {
        label: float(np.mean([math.log(x) - np.mean(by_pair[pair]) for pair, x in figures.items()]))
        for label, figures in speeds.items()
    }
    if not centered:
        return None
    first = max(sorted(centered), key=centered.__getitem__)
    for _ in speeds:
        faster = {
            label: ratio.ratio
            for label in speeds
            if label != first
            and (ratio := _ratio(speeds, first, label)) is not None
            and ratio.ratio < 1
        }
        if not faster:
            break
        first = min(faster, key=faster.__getitem__)
    return first


def _ratio(figures: Figures, over: str, under: str | None) -> PairedRatio | None:
    """Return the ratio of two labels' figures; None if they have no pair."""
    first, second = figures.get(over, {}), figures.get(under or "", {})
    both = sorted(first.keys() & second.keys())
    if not both:
        return None
    return paired_ratio([first[pair] for pair in both], [second[pair] for pair in both])


def _pooled(runs: Sequence[MeasuredRun], figure: Callable[[Measurement], float]) -> Figures:
    """Return a figure by label and pair; runs with the same plan have their median."""
    by_plan = _by_plan(runs, figure)
    by_label: dict[str, dict[Pair, list[float]]] = defaultdict(lambda: defaultdict(list))
    for run, number, _ in _measurements(runs, figure):
        pair = run.seed, number
        by_label[run.label][pair].append(float(np.median(by_plan[run.plan, pair])))
    return {
        label: {pair: math.exp(float(np.mean(logs))) for pair, logs in by_pair.items()}
        for label, by_pair in by_label.items()
    }


def _noise(runs: Sequence[MeasuredRun]) -> float | None:
    """Return the factor between two throughputs of one plan and pair."""
    differences = [
        abs(one - other)
        for logs in _by_plan(runs, lambda found: found.samples_per_s).values()
        for one, other in itertools.combinations(logs, 2)
    ]
    return math.exp(float(np.quantile(differences, CONFIDENCE))) if differences else None


def _by_plan(
    runs: Sequence[MeasuredRun], figure: Callable[[Measurement], float]
) -> dict[tuple[str, Pair], list[float]]:
    """Return the logarithms of a figure by plan and pair."""
    logs: dict[tuple[str, Pair], list[float]] = defaultdict(list)
    for run, number, found in _measurements(runs, figure):
        logs[run.plan, (run.seed, number)].append(math.log(found))
    return logs


def _measurements(
    runs: Sequence[MeasuredRun], figure: Callable[[Measurement], float]
) -> Iterator[tuple[MeasuredRun, int, float]]:
    for run in runs:
        for number, found in run.measurements.items():
            if (value := figure(found)) > 0:
                yield run, number, value
