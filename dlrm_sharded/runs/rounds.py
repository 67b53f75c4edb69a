"""rounds.jsonl: the measurements of a run in the rounds of a sweep, in turn with other runs.

Runs that were measured in the same round shared hosts and time, so their figures are pairs. Rounds
that were disturbed by other work on the hosts are detected and measured again. The sweep itself
tells what is usual: a rank's threads also wait for each other, and the steps of some models vary
more than those of others.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import numpy as np

from dlrm_sharded.files.json_forms import read_form
from dlrm_sharded.files.limited import Int, NonNegative, PositiveFloat
from dlrm_sharded.files.line_file import LineFile
from dlrm_sharded.files.text_table import quantity, span
from dlrm_sharded.ranks.gpus import GpuStates

FILE_NAME = "rounds.jsonl"

FIGURES = "embedding_cost_ms", "step_ms", "samples_per_s"
"""Figures that rounds measure again; all others of a run are those of its training."""

MAX_EXCESS_WAIT = 0.1
"""Largest excess over the usual share of time in which others have a rank's core."""

MAX_SPREAD = 3.0, 0.1
"""Factor and summand: a larger spread of steps than usual * factor + summand is a disturbance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """The figures of a run in one round.

    Args:
        round: number of the round, from 0.
        place: number of runs that were measured before this one in the round.
        spread: largest interquartile range of a stage's times, relative to its median.
        step_spread: relative excess of the steps' 90th percentile over their median time.
        hosts, began_s, core_wait, gpus: load during the steps, see `MachineLoad`.
        seconds: duration of the measurement, including building the model.
        attempt: 1 for the repetition of a disturbed round, else 0.
    """

    round: Int
    place: Int
    embedding_cost_ms: PositiveFloat
    spread: NonNegative
    step_ms: PositiveFloat
    step_spread: NonNegative
    samples_per_s: PositiveFloat
    hosts: Mapping[str, NonNegative]
    began_s: NonNegative
    core_wait: NonNegative
    seconds: NonNegative
    attempt: Int = 0
    gpus: tuple[GpuStates, ...] = ()


def rounds_file(run_dir: Path) -> LineFile:
    """Return the file in the folder of a run, whether or not it exists."""
    return LineFile(run_dir / FILE_NAME, "round")


def read_rounds(run_dir: Path) -> dict[int, Round]:
    """Return the rounds of a run by number; if a round was repeated, its latest measurement."""
    file, parse = rounds_file(run_dir), functools.partial(read_form, form=Round, name="a round")
    return {found.round: found for found in file.latest(parse).values()}


def disturbed_rounds(runs: Sequence[Mapping[int, Round]]) -> set[int]:
    """Return the rounds in which at least one measurement is far from the usual."""
    measured = [found for rounds in runs for found in rounds.values()]
    if not measured:
        return set()
    usual_wait = float(np.median([found.core_wait for found in measured]))
    usual_spread = float(np.median([found.step_spread for found in measured]))
    factor, summand = MAX_SPREAD
    return {
        found.round
        for found in measured
        if found.core_wait > usual_wait + MAX_EXCESS_WAIT
        or found.step_spread > factor * usual_spread + summand
        or any(gpu.is_disturbed for gpu in found.gpus)
    }


def undisturbed_rounds(folders: Iterable[Path]) -> dict[Path, dict[int, Round]]:
    """Return the rounds of a sweep's runs that were not disturbed, or all rounds if all were.

    Runs without rounds are left out.
    """
    runs = {folder: found for folder in folders if (found := read_rounds(folder))}
    disturbed = disturbed_rounds([*runs.values()])
    return {
        folder: {number: one for number, one in rounds.items() if number not in disturbed} or rounds
        for folder, rounds in runs.items()
    }


def mean_figures(runs: Mapping[Path, Mapping[int, Round]]) -> dict[Path, dict[str, float]]:
    """Return the means of a sweep's runs over the rounds that all have, or else over their own."""
    means = {}
    for folder, rounds in runs.items():
        common = set.intersection(*map(set, runs.values()))
        kept = [rounds[number] for number in common or rounds]
        means[folder] = {name: fmean(getattr(one, name) for one in kept) for name in FIGURES}
    return means


def rounds_to_repeat(runs: Sequence[Mapping[int, Round]]) -> list[int]:
    """Return the rounds whose repetition is incomplete, and those that need a repetition.

    A round is repeated at most once, with all its runs, so that pairs stay complete.
    """
    first, again = (
        {number for rounds in runs for number, found in rounds.items() if found.attempt == attempt}
        for attempt in (0, 1)
    )
    return sorted((first & again) | (disturbed_rounds(runs) - again))


def disturbance_text(runs: Sequence[Mapping[int, Round]]) -> str:
    """Return the numbers of rounds, of repeated and disturbed ones, and the load of all rounds."""
    measured = [found for rounds in runs for found in rounds.values()]
    repeated = {found.round for found in measured if found.attempt}
    loads = [load for found in measured for load in found.hosts.values()]
    return (
        f"{quantity(len(set().union(*runs)), 'round')}; measured again: {len(repeated)}; disturbed "
        f"by other work: {len(disturbed_rounds(runs))} (load that is equal in all does not count); "
        f"load average, with the ranks' own work: {span(loads or [0.0], '.2f')}; others had the "
        f"cores for {span([found.core_wait for found in measured], '.0%')} of a measurement"
    )
