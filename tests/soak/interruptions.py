"""Interrupt runs at random moments; each must go on, and end as if it had not been interrupted."""

from __future__ import annotations

import itertools
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.soak.training_run import INTERVAL, TrainingRun, differences, kill, until

KINDS = ("one rank", "all ranks", "agent", "SIGTERM")
"""The processes that are killed with SIGKILL; torchrun's agent may get SIGTERM instead."""

MOMENTS = ("save", "steps", "save", "steps", "save", "start", "save", "steps")
"""A checkpoint is being written, steps are being trained, or the ranks are starting."""


WAITS_S = {"start": 10.0, "steps": 1.0, "save": 0.1}
"""Longest times from a moment to its interruption."""


@dataclass
class Found:
    """Number of interruptions by kind and moment, and what was wrong."""

    interruptions: Counter[tuple[str, str]] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)


def interrupt_runs(folder: Path, number: int, *, per_run: int, seed: int) -> Found:
    """Train once undisturbed, then with interruptions, and compare what the runs leave behind."""
    rng = random.Random(seed)
    drawn = zip(_in_random_order(KINDS, rng), _in_random_order(MOMENTS, rng), strict=True)
    kind, moment = next(drawn)
    reference = TrainingRun(folder / "undisturbed")
    try:
        reference.start()
        if (code := reference.finish()) != 0:
            raise RuntimeError(f"the undisturbed run ended with {code}: {reference.output()}")
    finally:
        reference.stop()
    found, numbers = Found(), itertools.count()
    while (most := min(per_run, number - found.interruptions.total())) > 0:
        background = rng.choice(("true", "false"))
        name = f"run_{next(numbers)}"
        trained = TrainingRun(folder / name, f"trainer.checkpoint.background={background}")
        faults = []
        try:
            trained.start()
            for _ in range(most):
                wait_s = rng.uniform(0.0, WAITS_S[moment])
                at, wrong = _interrupt(trained, kind, moment, wait_s, rng)
                if at is None:
                    break  # it ended before; the next run is interrupted like that
                found.interruptions[kind, at] += 1
                faults += wrong
                kind, moment = next(drawn)
            if (code := trained.finish()) != 0:
                faults.append(f"exit code {code}: {trained.output()[-2000:]}")
            else:
                faults += differences(trained, reference)
            if trained.saving_step() is not None:
                faults.append(f"the unfinished checkpoint at {trained.saving_step()} is left")
        except TimeoutError as error:
            faults.append(str(error))
        finally:
            trained.stop()
        found.faults += [f"{name}: {fault}" for fault in faults]
    return found


def _in_random_order(values: Sequence[str], rng: random.Random) -> Iterator[str]:
    """Yield all values in random order, again and again."""
    while True:
        yield from rng.sample(values, len(values))


def _interrupt(
    trained: TrainingRun, kind: str, moment: str, wait_s: float, rng: random.Random
) -> tuple[str | None, list[str]]:
    """Interrupt a run some time after a moment, and wait until it starts again.

    Returns:
        The moment at which the signal came, None if the run ended before, and what is wrong.
    """
    begun, offset = time.time(), trained.output_bytes()
    if moment != "start":
        until(lambda: trained.has_ended or trained.trains_since(offset), "the first step")
    if moment == "save":
        until(
            lambda: trained.has_ended or trained.saving_step(since=begun) is not None,
            "a checkpoint",
        )
    time.sleep(wait_s)
    if trained.has_ended:
        return None, []
    num_starts = len(trained.starts())
    saving, has_trained = trained.saving_step(since=begun), trained.trains_since(offset)
    at = "save" if saving is not None else "steps" if has_trained else "start"
    newest, reached = trained.newest_step(), trained.logged_step(offset)
    _hit(trained, kind, rng)
    if kind == "SIGTERM" and has_trained:
        newest = max(newest, reached)  # it writes a checkpoint before it ends
    until(lambda: len(trained.starts()) > num_starts or trained.has_ended, "the next start")
    if len(trained.starts()) == num_starts:
        if trained.agent.wait() == 0 and "and its result stays" in trained.output():
            return None, []  # the signal came after the last step
        return at, [f"{kind}, {at}: the run did not start again"]
    resumed = trained.starts()[num_starts]
    faults = []
    if resumed < newest:
        faults.append(f"{kind}, {at}: it went on at {resumed}, and should have at {newest}")
    if saving is not None and saving - resumed > INTERVAL:
        faults.append(f"{kind}, {at}: it went on at {resumed}, and had begun to save {saving}")
    return at, faults


def _hit(trained: TrainingRun, kind: str, rng: random.Random) -> None:
    """Interrupt a run, and start it again where torchrun does not.

    A run whose agent was killed must not leave ranks behind.
    """
    if kind in ("one rank", "all ranks"):
        pids = sorted(pid for pid, is_rank in trained.processes().items() if is_rank)
        for pid in pids if kind == "all ranks" else rng.sample(pids, min(1, len(pids))):
            kill(pid, signal.SIGKILL)
        return
    kill(trained.agent.pid, signal.SIGTERM if kind == "SIGTERM" else signal.SIGKILL)
    trained.agent.wait()
    until(lambda: not trained.processes(), "the end of all ranks", poll_s=0.05)
    trained.start()
