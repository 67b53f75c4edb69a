"""rounds.jsonl: what the rounds of a sweep measured of a run, in turns with others.

Runs that were measured in the same round shared its hosts and minutes, so their figures are pairs.
Rounds that other work on the hosts has disturbed are found and measured again. What is usual
follows from the sweep itself: the threads of a rank wait for one another too, and steps of one
model vary more than those of another.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dlrm_sharded.files.json_forms import read_form
from dlrm_sharded.files.limited import Int, NonNegative, PositiveFloat
from dlrm_sharded.files.line_file import LineFile
from dlrm_sharded.ranks.gpus import GpuStates

FILE_NAME = "rounds.jsonl"

MAX_CORE_WAIT = 0.1
"""Share of a measurement, beyond the usual one, in which others may have a rank's core."""

MAX_SPREAD = 3.0, 0.1
"""Factor and summand beyond the usual spread of steps at which a measurement gives itself away."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """The figures of a run in one round.

    Args:
        round: number of the round, from 0.
        place: how many runs were measured before this one in the round.
        spread: the largest of the stages' interquartile ranges, relative to their medians.
        step_spread: how much longer the slowest tenth of the steps took than the median, relative.
        hosts, began_s, core_wait, gpus: see `MachineLoad`, of the steps.
        seconds: how long the measurement took, with building the model.
        attempt: 1 if the round was disturbed and this is its repetition, else 0.
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
    """Return the file in the folder of a run; it need not exist."""
    return LineFile(run_dir / FILE_NAME, "round")


def read_rounds(run_dir: Path) -> dict[int, Round]:
    """Return the rounds of a run by number; of one that was measured again, the latest counts."""
    file, parse = rounds_file(run_dir), functools.partial(read_form, form=Round, name="a round")
    return {found.round: found for found in file.latest(parse, most=10**6).values()}


def disturbed_rounds(runs: Sequence[Mapping[int, Round]]) -> set[int]:
    """Return the rounds of which at least one measurement is far from what is usual."""
    measured = [found for rounds in runs for found in rounds.values()]
    if not measured:
        return set()
    usual_wait = float(np.median([found.core_wait for found in measured]))
    usual_spread = float(np.median([found.step_spread for found in measured]))
    factor, summand = MAX_SPREAD
    return {
        found.round
        for found in measured
        if found.core_wait > usual_wait + MAX_CORE_WAIT
        or found.step_spread > factor * usual_spread + summand
        or any(gpu.is_disturbed for gpu in found.gpus)
    }


def rounds_to_repeat(runs: Sequence[Mapping[int, Round]]) -> list[int]:
    """Return the rounds whose repetition was begun and not ended, and those that need one.

    Each is repeated once, with all its runs, so that pairs stay pairs.
    """
    first, again = (
        {number for rounds in runs for number, found in rounds.items() if found.attempt == attempt}
        for attempt in (0, 1)
    )
    return sorted((first & again) | (disturbed_rounds(runs) - again))


def disturbance_text(runs: Sequence[Mapping[int, Round]]) -> str:
    """Say how many rounds were repeated, and are disturbed still."""
    repeated = {number for rounds in runs for number in rounds if rounds[number].attempt}
    return (
        f"{len(set().union(*runs))} rounds, of which {len(repeated)} were measured again, and "
        f"{len(disturbed_rounds(runs))} are disturbed by other work"
    )
