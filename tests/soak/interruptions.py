"""Interrupt runs at random moments; each must go on, and end as if it had not been interrupted."""

from __future__ import annotations

import argparse
import itertools
import logging
import random
import signal
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dlrm_sharded.files.text_table import Column, TextTable
from tests.soak.folders import folder_of
from tests.soak.outcomes import checkpoint_faults, event_faults
from tests.soak.training_run import SMALL, HangingError, TrainingRun, kill, until

log = logging.getLogger(__name__)

KINDS = ("one rank", "all ranks", "agent", "SIGTERM")
"""The processes that are killed with SIGKILL; torchrun's agent may get SIGTERM instead."""

MOMENTS = ("save", "steps", "save", "steps", "save", "start", "save", "steps")
"""A checkpoint is being written, steps are being trained, or the ranks are starting."""

NUM_STEPS = 160
INTERVAL = 20
EVAL_INTERVAL = 50
TRAINING_BEGINS = "embedding cost"
"""Text in the output of a run just before its first step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interruption:
    """One interruption of a run and what came after it.

    Args:
        moment: one of `MOMENTS`, as it was at the kill.
        lost_steps: steps that were trained, logged, and then trained again; None if the run had
            not begun to train.
        resume_s: time from the interruption to the moment when the ranks know where they go on;
            None if the run had not begun to train.
        faults: what was wrong, as texts.
    """

    kind: str
    moment: str
    lost_steps: int | None
    resume_s: float | None
    faults: tuple[str, ...]


@dataclass
class Runs:
    """The interrupted runs, and what was found of them.

    Args:
        run_faults: what was wrong at the end of a run, by its name.
    """

    interruptions: list[Interruption] = field(default_factory=list)
    run_faults: dict[str, list[str]] = field(default_factory=dict)

    @property
    def faults(self) -> list[str]:
        return [
            *(f"{x.kind}, {x.moment}: {fault}" for x in self.interruptions for fault in x.faults),
            *(f"{name}: {fault}" for name, of_run in self.run_faults.items() for fault in of_run),
        ]


@dataclass(frozen=True, slots=True)
class Durations:
    """Times of the run that was not interrupted, in s.

    Args:
        start_s: from the start to the first step.
        interval_s: from one checkpoint to the next.
    """

    start_s: float
    interval_s: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--number", type=int, default=50, help="interruptions [%(default)s]")
    parser.add_argument("--per-run", type=int, default=5, help="... of one run [%(default)s]")
    parser.add_argument("--seed", type=int, default=0, help="seed of the moments [%(default)s]")
    parser.add_argument("--folder", type=Path, help="where runs are kept; by default nowhere")


def run(options: argparse.Namespace) -> int:
    with folder_of(options.folder) as folder:
        runs = interrupt_runs(folder, options.number, per_run=options.per_run, seed=options.seed)
    print(table(runs))
    return 1 if runs.faults else 0


def interrupt_runs(folder: Path, number: int, *, per_run: int, seed: int) -> Runs:
    """Train once undisturbed, then with interruptions, and compare what the runs leave behind."""
    rng = random.Random(seed)
    drawn = zip(_in_random_order(KINDS, rng), _in_random_order(MOMENTS, rng), strict=True)
    kind, moment = next(drawn)
    reference = new_run(folder / "undisturbed", max_restarts=0)
    durations = _timed(reference)
    runs = Runs()
    while (most := min(per_run, number - len(runs.interruptions))) > 0:
        name = f"run_{len(runs.run_faults)}"
        background = rng.choice(("true", "false"))
        trained = new_run(
            folder / name, f"trainer.checkpoint.background={background}", max_restarts=1000
        )
        faults = runs.run_faults[name] = []
        try:
            trained.start()
            for _ in range(most):
                done = _interrupt(trained, kind, moment, durations, rng)
                if done is None:
                    break  # the next run is interrupted like that
                kind, moment = next(drawn)
                runs.interruptions.append(done)
                log.warning("%s %s", name, done)
            faults += end_faults(trained, reference)
        except HangingError as error:
            faults.append(str(error))
        finally:
            trained.stop()
        if faults:
            log.warning("%s: %s", name, "; ".join(faults))
    return runs


def new_run(folder: Path, *overrides: str, max_restarts: int) -> TrainingRun:
    return TrainingRun(
        folder,
        *SMALL,
        *(f"trainer.num_steps={NUM_STEPS}", f"trainer.eval_every_steps={EVAL_INTERVAL}"),
        *(f"trainer.checkpoint.every_steps={INTERVAL}", "resume=auto", *overrides),
        max_restarts=max_restarts,
        is_killed=True,
    )


def end_faults(trained: TrainingRun, reference: TrainingRun) -> list[str]:
    """Return how a run that has gone on to its end differs from an undisturbed one."""
    code = trained.finish()
    if code != 0:
        return [f"exit code {code}: {trained.output()[-2000:]}"]
    faults = event_faults(trained.folder, reference.folder)
    faults += checkpoint_faults(trained.last_checkpoint(), reference.last_checkpoint())
    mine, expected = trained.result(), reference.result()
    for key in ("steps", "loss", "auroc", "normalized_entropy"):
        if mine.get(key) != expected[key]:
            faults.append(f"{key} in result.json is {mine.get(key)} instead of {expected[key]}")
    if mine.get("interruptions") != len(trained.starts()) - 1:
        faults.append(f"{mine.get('interruptions')} interruptions, {len(trained.starts())} starts")
    if trained.saving_step() is not None:
        faults.append(f"the unfinished checkpoint at step {trained.saving_step()} is left")
    return faults


def table(runs: Runs) -> str:
    """Return a Markdown table by kind and moment, and all faults."""
    columns = ["interrupted", "at", "number", "resumed", "most steps lost"]
    rows = []
    for kind, moment in itertools.product(KINDS, sorted(set(MOMENTS))):
        found = [x for x in runs.interruptions if (x.kind, x.moment) == (kind, moment)]
        if not found:
            continue
        good = sum(not x.faults for x in found)
        lost = [x.lost_steps for x in found if x.lost_steps is not None]
        took = [x.resume_s for x in found if x.resume_s is not None]
        median_s = statistics.median(took) if took else None
        rows.append((kind, moment, len(found), good, max(lost, default=None), median_s))
    equal = sum(not faults for faults in runs.run_faults.values())
    lines = [
        TextTable([*columns, Column("s to the next start, median", ".1f")], rows).markdown(),
        "",
        f"{equal} of {len(runs.run_faults)} runs ended like the undisturbed one",
    ]
    return "\n".join([*lines, *(f"fault: {fault}" for fault in runs.faults)])


def _in_random_order(values: Sequence[str], rng: random.Random) -> Iterator[str]:
    """Yield all values in random order, again and again."""
    while True:
        yield from rng.sample(values, len(values))


def _timed(reference: TrainingRun) -> Durations:
    start_s = time.monotonic()
    reference.start()
    try:
        until(lambda: reference.has_ended or _trains(reference, 0), "the first step")
        first_s = time.monotonic()
        until(lambda: reference.has_ended or reference.saved_steps() != [], "a checkpoint")
        saved_s = time.monotonic()
        if (code := reference.finish()) != 0:
            raise RuntimeError(f"the undisturbed run ended with {code}: {reference.output()}")
    finally:
        reference.stop()
    return Durations(first_s - start_s, saved_s - first_s)


def _trains(trained: TrainingRun, offset: int) -> bool:
    """Return whether the output after an offset says that the ranks begin to train."""
    return TRAINING_BEGINS in trained.output(offset)


def _interrupt(
    trained: TrainingRun, kind: str, moment: str, durations: Durations, rng: random.Random
) -> Interruption | None:
    """Interrupt a run and wait until it starts again; None if it ended before."""
    begun = time.time()
    offset = trained.output_bytes()
    if not _reach(trained, moment, durations, rng, offset=offset, begun=begun):
        return None
    num_starts = len(trained.starts())
    reached = max([_logged_step(trained, offset), *trained.starts()[-1:]])
    has_trained = _trains(trained, offset)
    saving = trained.saving_step(since=begun)
    moment = "save" if saving is not None else "steps" if has_trained else "start"
    newest = max([0, *trained.saved_steps()])
    killed_s = time.monotonic()
    trouble = _hit(trained, kind, rng)
    faults = [] if trouble is None else [trouble]
    if kind == "SIGTERM" and has_trained:
        newest = max([0, *trained.saved_steps()])
        if newest < reached:
            faults.append(f"step {reached} was reached, the last checkpoint is at {newest}")
    until(lambda: len(trained.starts()) > num_starts or trained.has_ended, "the next start")
    if len(trained.starts()) == num_starts:
        if trained.agent.wait() == 0 and "and its result stays" in trained.output():
            return None  # the signal came after the last step
        faults.append(f"the run ended with {trained.agent.wait()}: {trained.output()[-2000:]}")
        return Interruption(
            kind=kind, moment=moment, lost_steps=None, resume_s=None, faults=tuple(faults)
        )
    resumed = trained.starts()[num_starts]
    if resumed < newest:
        faults.append(f"the run went on at step {resumed}, it had a checkpoint at {newest}")
    if saving is not None and saving - resumed > INTERVAL:
        faults.append(f"the run went on at step {resumed}, and had begun to save step {saving}")
    return Interruption(
        kind=kind,
        moment=moment,
        lost_steps=max(0, reached - resumed) if has_trained else None,
        resume_s=time.monotonic() - killed_s if has_trained else None,
        faults=tuple(faults),
    )


def _reach(
    trained: TrainingRun,
    moment: str,
    durations: Durations,
    rng: random.Random,
    *,
    offset: int,
    begun: float,
) -> bool:
    """Wait for a moment; return false if the run ends before."""
    if moment == "start":
        time.sleep(rng.uniform(0.0, durations.start_s))
        return not trained.has_ended
    until(lambda: trained.has_ended or _trains(trained, offset), "the first step")
    if moment == "steps":
        time.sleep(rng.uniform(0.0, durations.interval_s))
        return not trained.has_ended
    until(lambda: trained.has_ended or trained.saving_step(since=begun) is not None, "a checkpoint")
    time.sleep(rng.uniform(0.0, 0.1))
    return not trained.has_ended


def _hit(trained: TrainingRun, kind: str, rng: random.Random) -> str | None:
    """Interrupt a run, and start it again where torchrun does not; return what is wrong, or None.

    A run whose agent was killed must not leave ranks behind.
    """
    if kind in ("one rank", "all ranks"):
        pids = sorted(trained.ranks().values())
        for pid in pids if kind == "all ranks" else rng.sample(pids, min(1, len(pids))):
            kill(pid, signal.SIGKILL)
        return None
    number = signal.SIGTERM if kind == "SIGTERM" else signal.SIGKILL
    kill(trained.agent.pid, number)
    trained.agent.wait()
    try:
        until(lambda: not trained.processes(), "the end of all ranks", poll_s=0.05)
    except HangingError as error:
        trained.stop()
        trained.start()
        return str(error)
    trained.start()
    return None


def _logged_step(trained: TrainingRun, offset: int) -> int:
    """Return the step of the progress bar; 0 before its first."""
    words = trained.output(offset).replace("[", " ").split()
    steps = [
        int(done)
        for done, slash, total in (word.partition("/") for word in words)
        if slash and total == str(NUM_STEPS) and done.isdigit()
    ]
    return steps[-1] if steps else 0
