"""Says what to do after a bring-up, from what its steps found out."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

from bring_up.steps import MAIN_ERROR, MEASURING
from studies.runner import Outcome

MAX_ERROR_PERCENT = 10.0
"""Mean error of calibrated prices above which a longer calibration is advised."""

MAX_OVER_HEURISTIC = 1.03
"""Predicted cost over the best heuristic's above which a policy is to be trained for longer."""

BUSY_LOAD_PER_CORE = 2
"""Load per core before a step above which other work ran; the steps themselves cause less."""


def advice(outcomes: Sequence[Outcome], *, is_rehearsal: bool) -> Iterator[str]:
    """Yield sentences, the most urgent first."""
    by_name = {outcome.step: outcome for outcome in outcomes}
    for outcome in outcomes:
        if outcome.status != "ok":
            mend = f"look at {outcome.step}.log, mend the cause, and "
            yield (
                f"For the step {outcome.step}, {'' if outcome.seconds is None else mend}start the "
                "same command again: it leaves out what succeeded."
            )
    if is_rehearsal:
        yield (
            "These are figures of a rehearsal and describe no machine. Run the command without "
            "--small, in another folder."
        )
        return
    loaded = [name for name in MEASURING if name in by_name and _was_loaded(by_name[name])]
    if loaded:
        yield (
            f"Other work ran beside {', '.join(loaded)}. Remove the JSON files of these steps "
            "and start the same command again when the machine does nothing else."
        )
    calibrate = by_name.get("calibrate")
    if calibrate is not None and calibrate.status == "ok":
        yield from _about_prices(calibrate)
    if "policies" in by_name:
        yield from _about_policies(by_name["policies"])
    if "benchmark" in by_name:
        yield from _about_sharders(by_name["benchmark"])


def _was_loaded(outcome: Outcome) -> bool:
    before = outcome.load_average.get("before")
    cores = len(os.sched_getaffinity(0))
    return before is not None and before[0] > BUSY_LOAD_PER_CORE * cores


def _about_prices(calibrate: Outcome) -> Iterator[str]:
    error = calibrate.figures["held_out_errors"][MAIN_ERROR]["mape"]
    if error > MAX_ERROR_PERCENT:
        yield (
            f"The calibrated prices are off by {error:.1f} %; `dlrm-calibrate minutes=10` refines "
            "them."
        )
    yield (
        "Copy the folder calibration/ to where you start runs. They then use these prices and "
        "policies, and every run corrects them."
    )


def _about_policies(policies: Outcome) -> Iterator[str]:
    for policy, trained in policies.figures.items():
        over_best = trained["over_best_heuristic"]
        if over_best > MAX_OVER_HEURISTIC:
            yield (
                f"Plans of {policy} cost {over_best:.3f} times those of a heuristic. Train it for "
                f"longer: `dlrm-train-policy policy={policy} costs=predicted`."
            )


def _about_sharders(benchmark: Outcome) -> Iterator[str]:
    """Yield which of neuroshard and torchrec to use, if the tasks were enough to tell."""
    intervals = benchmark.figures.get("cost_ms over torchrec, 95 %", {})
    if "neuroshard" not in intervals:
        return
    low, high = intervals["neuroshard"]
    mean = benchmark.figures["cost_ms over torchrec"]["neuroshard"]
    if high < 1:
        yield (
            f"Use the default sharder, neuroshard: its plans cost {100 * (1 - mean):.1f} % less "
            "than those of TorchRec's planner."
        )
    elif low > 1:
        yield (
            f"Plans of neuroshard cost {mean:.3f} times those of TorchRec's planner here. "
            "Calibrate for longer, or plan with sharder=torchrec."
        )
    else:
        yield (
            f"Plans of neuroshard cost {mean:.3f} times those of TorchRec's planner, which so few "
            "tasks cannot tell from 1; `make benchmark ARGS=measured` has more."
        )
