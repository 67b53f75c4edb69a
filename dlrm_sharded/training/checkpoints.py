"""The checkpoints of a training run: when they are due, and what they contain."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress

from dlrm_sharded.checkpoint.manifest import RunState
from dlrm_sharded.checkpoint.model_state import ModelState
from dlrm_sharded.checkpoint.saver import CheckpointConfig, Saver
from dlrm_sharded.files.errors import PreemptedError, UnsavedError
from dlrm_sharded.ranks.agreement import as_reported_by_rank_zero
from dlrm_sharded.ranks.distributed import Rank
from dlrm_sharded.training.meeting import Meeting
from dlrm_sharded.training.progress import Progress

log = logging.getLogger(__name__)

Describe = Callable[[Progress], RunState]
"""Describes the run at a point in its training, for the manifest."""


class Checkpoints(AbstractContextManager["Checkpoints"]):
    """Writes checkpoints at intervals, and when a signal asks the training run to stop.

    All ranks call its methods together. Within the `with` block, signals are recorded and do not
    end the process.

    Args:
        saver: closed at the end of the block.
        model: state of the model, whose tensors change as it trains.
        describe: called on every rank when a checkpoint is written.
    """

    def __init__(
        self,
        saver: Saver,
        config: CheckpointConfig,
        model: ModelState,
        *,
        describe: Describe,
        rank: Rank,
    ) -> None:
        self._saver = saver
        self._config = config
        self._model = model
        self._describe = describe
        self._rank = rank
        self._meeting = Meeting(rank, every_s=config.every_s)
        self._signals = self._meeting.signals()
        self._is_due = self._must_end = False
        self._stop: signal.Signals | None = None

    def __enter__(self) -> Checkpoints:
        self._signals.__enter__()
        return self

    def __exit__(self, error: type[BaseException] | None, *args: object) -> None:
        self._signals.__exit__(None, None, None)
        # After an error, the background writer may wait for a rank that is gone.
        with suppress(Exception) if error is not None else nullcontext():
            self._saver.close()

    @property
    def failure(self) -> str | None:
        """Why the last checkpoint could not be written; None if it was."""
        return self._saver.failure

    def stops_evaluation(self) -> bool:
        """Return, after each batch of an evaluation, whether the evaluation must end early."""
        self._meet()
        return self._stop is not None or self._must_end

    def after_step(
        self,
        step: int,
        *,
        is_complete: bool,
        progress: Callable[[], Progress],
        is_best: bool = False,
    ) -> None:
        """Write a checkpoint if one is due.

        Args:
            is_complete: whether this was the last step and its evaluation is done.
            progress: returns the trainer's state; called only if it is needed.
            is_best: whether the evaluation after this step is the best one, so that a checkpoint
                is due.

        Raises:
            DivergenceError: the checkpoint, or the one before, has values that are not finite.
            LostFolderError: another job has taken the run's folder over.
            PreemptedError: a signal asked for the end, and a checkpoint was written.
            UnsavedError: a signal asked for the end, and no checkpoint could be written.
        """
        self._meet()
        if self._must_end:
            self._saver.finish()
        every = self._config.every_steps
        self._is_due |= is_best or (every is not None and step % every == 0)
        with self._rank.heartbeat.rest():
            if self._is_due or is_complete or self._stop is not None:
                self._save(progress())
                self._is_due = False
            if is_complete or self._stop is not None:
                self._saver.finish()
        if self._stop is not None and not is_complete:
            raise as_reported_by_rank_zero(self._stopped(self._stop, step))

    def _meet(self) -> None:
        self._saver.poll()
        decision = self._meeting.after_batch(
            may_save=not self._saver.is_busy, must_end=self._saver.must_end
        )
        self._is_due |= decision.saves
        self._must_end |= decision.must_end
        self._stop = self._stop or decision.stop

    def _stopped(self, stop: signal.Signals, step: int) -> PreemptedError | UnsavedError:
        stopped = f"{stop.name} stopped the training after step {step}"
        if self.failure is not None:
            return UnsavedError(f"{stopped}, and no checkpoint could be written: {self.failure}")
        return PreemptedError(f"{stopped}; its checkpoint is written: continue with resume=auto")

    def _save(self, progress: Progress) -> None:
        tensors = {**self._model.tensors, **progress.tensors(self._rank)}
        self._saver.save(tensors, self._describe(progress))
        self._meeting.has_saved()
