"""Finds the rounds of a sweep that other work on the hosts has disturbed, and says so.

What is usual follows from the sweep itself: the threads of a rank wait for one another too, and
steps of one model vary more than those of another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from dlrm_sharded.runs.rounds import Round

Rounds = Mapping[int, Round]
"""The rounds of a run by number."""

MAX_CORE_WAIT = 0.1
"""Share of a measurement, beyond the usual one, in which others may have a rank's core."""

MAX_SPREAD = 3.0, 0.1
"""Factor and summand beyond the usual spread of steps at which a measurement gives itself away."""

ENOUGH_REPEATS = 2
"""Rounds that are repeated before it is judged whether that helps."""


def disturbed_rounds(runs: Sequence[Rounds]) -> set[int]:
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
    }


def rounds_to_repeat(runs: Sequence[Rounds]) -> list[int]:
    """Return the rounds whose repetition was begun and not ended, and those that need one.

    Each is repeated once, with all its runs, so that pairs stay pairs. If no repetition was calmer,
    the load is here to stay, and the others are not repeated.
    """
    disturbed = disturbed_rounds(runs)
    attempts: dict[int, set[int]] = {}
    for rounds in runs:
        for number, found in rounds.items():
            attempts.setdefault(number, set()).add(found.attempt)
    repeated = {number for number, found in attempts.items() if 1 in found}
    to_repeat = {number for number in repeated if 0 in attempts[number]}
    if len(repeated) < ENOUGH_REPEATS or not repeated <= disturbed:
        to_repeat |= disturbed - repeated
    return sorted(to_repeat)


def disturbance_text(runs: Sequence[Rounds]) -> str | None:
    """Say how many rounds were repeated, and are disturbed still; None without any."""
    numbers = {number for rounds in runs for number in rounds}
    repeated = {n for rounds in runs for n, found in rounds.items() if found.attempt}
    disturbed = disturbed_rounds(runs)
    if not repeated | disturbed:
        return None
    return (
        f"rounds measured again, as other processes had the cores or steps varied more than usual: "
        f"{len(repeated)} of {len(numbers)}; rounds that are disturbed still: {len(disturbed)}"
    )
