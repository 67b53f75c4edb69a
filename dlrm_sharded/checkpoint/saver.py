"""Writes checkpoints, in the background if the memory allows a copy of the model."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from dlrm_sharded.checkpoint.folder import (
    FOLDER_KEY,
    checkpoint_path,
    keep_newest,
    make_partial,
    partial_path,
    publish,
    remove_partial,
)
from dlrm_sharded.checkpoint.logical import LogicalTensor, Piece, State
from dlrm_sharded.checkpoint.manifest import RunState
from dlrm_sharded.checkpoint.storage import write_checkpoint
from dlrm_sharded.files.errors import (
    AGAINST_DIVERGENCE,
    ConfigError,
    DivergenceError,
    LostFolderError,
    RankError,
    UserError,
    check_count,
    check_number,
)
from dlrm_sharded.files.remote_files import Location, RemotePath, location
from dlrm_sharded.ranks.agreement import as_reported_by_rank_zero, on_rank_zero
from dlrm_sharded.ranks.distributed import Rank, new_group

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    """When checkpoints are written, and how many are kept. Without an interval, none are written.

    Args:
        every_steps, every_s: interval in steps and in seconds; None for none.
        keep: number of newest checkpoints that are kept, in addition to the best one.
        background: whether a copy of the model is written while training continues; None for yes
            if the memory allows it.
        folder: URL in an object store, such as s3://bucket/run, under which checkpoints are
            written, and copies of the run's files; None for the run's own folder.
    """

    every_steps: int | None = None
    every_s: float | None = None
    keep: int = 2
    background: bool | None = None
    folder: str | None = None

    def __post_init__(self) -> None:
        if self.every_steps is not None:
            check_count("trainer.checkpoint.every_steps", self.every_steps, least=1)
        if self.every_s is not None:
            check_number("trainer.checkpoint.every_s", self.every_s, above=True)
        check_count("trainer.checkpoint.keep", self.keep, least=1)
        if self.folder is not None and not isinstance(
            location(FOLDER_KEY, self.folder), RemotePath
        ):
            raise ConfigError(
                f"{FOLDER_KEY} is {self.folder!r}; it must be a URL such as s3://bucket/run; "
                "hydra.run.dir names a folder that all hosts see"
            )

    @property
    def home(self) -> RemotePath | None:
        """Folder of checkpoints in an object store; None if they are in the run's own folder."""
        return None if self.folder is None else RemotePath(self.folder)

    @property
    def is_enabled(self) -> bool:
        return self.every_steps is not None or self.every_s is not None


class Saver:
    """Writes the checkpoints of a run; all ranks call its methods together.

    If a checkpoint cannot be written, an error is logged and training continues: the last good one
    is kept, and the next interval tries again. If it would hold values that are not finite, or
    another job has taken the folder over, it is not written and training has to end.

    Args:
        run_dir: folder of the run, or of its copies in an object store.
        keep: number of newest checkpoints that are kept, in addition to the best one.
        background: whether `save` returns once the state is copied.
        check_owner: raises LostFolderError if another job has the folder; rank 0 calls it before
            and after a checkpoint is written.
        keep_files: copies the run's other files to the folder of the checkpoints; rank 0 calls it
            after a checkpoint is written.
    """

    def __init__(
        self,
        run_dir: Location,
        *,
        keep: int,
        background: bool,
        rank: Rank,
        check_owner: Callable[[], None] = lambda: None,
        keep_files: Callable[[], None] = lambda: None,
    ) -> None:
        self._run_dir = run_dir
        self._keep = keep
        self._check_owner = check_owner
        self._keep_files = keep_files
        self._rank = rank
        # A separate group, because the thread's collectives must not mix with training's.
        self._group = new_group(backend="gloo")
        self._thread = ThreadPoolExecutor(1, "checkpoint") if background else None
        self._copies: dict[tuple[str, tuple[int, ...]], Tensor] = {}
        self._pending: Future[str | UserError | None] | None = None
        self._known: set[Location] = set()
        self._fatal: UserError | None = None
        self.failure: str | None = None
        """Why the last checkpoint could not be written; None if it was."""

    @property
    def is_busy(self) -> bool:
        return self._pending is not None and not self._pending.done()

    @property
    def must_end(self) -> bool:
        """Tells whether this rank knows that training has to end; `finish` raises the reason."""
        return self._fatal is not None

    def save(self, tensors: State, state: RunState) -> None:
        """Write a checkpoint, after the previous one is finished.

        Args:
            tensors: what to write; in the background, they are copied before this returns.

        Raises:
            DivergenceError, LostFolderError: see `finish`.
        """
        started = time.perf_counter()
        self.finish()
        if self._thread is None:
            self._conclude(self._write(tensors, state, started))
            self.finish()
            return
        copies = self._copied(tensors)
        waited_s = time.perf_counter() - started
        self._pending = self._thread.submit(self._write, copies, state, started, waited_s)

    def finish(self) -> None:
        """Wait until the last checkpoint is written or has failed.

        Raises:
            DivergenceError: one of its values is not finite; all ranks raise it.
            LostFolderError: another job has the folder; all ranks raise it.
        """
        self._take_result()
        if self._fatal is not None:
            raise as_reported_by_rank_zero(self._fatal)

    def poll(self) -> None:
        """Report a checkpoint that has finished since; ranks may notice it at different steps."""
        if self._pending is not None and self._pending.done():
            self._take_result()

    def close(self) -> None:
        """Finish the last checkpoint, and end the thread."""
        try:
            self.finish()
        finally:
            if self._thread is not None:
                self._thread.shutdown()

    def _take_result(self) -> None:
        if self._pending is not None:
            pending, self._pending = self._pending, None
            self._conclude(pending.result())

    def _conclude(self, failure: str | UserError | None) -> None:
        if isinstance(failure, UserError):
            self._fatal = failure
            return
        self.failure = failure
        if failure is not None and self._rank.is_zero:
            log.error(
                "no checkpoint could be written: %s; the training goes on, and the last good "
                "checkpoint is kept",
                failure,
            )

    def _copied(self, tensors: State) -> dict[str, LogicalTensor]:
        """Copy all pieces to host memory, which is reused for the next checkpoint.

        A piece is copied in blocks, because torch rounds page-locked memory up to a power of two: a
        full block takes `PART_BYTES`, but a whole shard of 5 GiB would take 8 GiB.
        """
        copied = {}
        for name, logical in tensors.items():
            pieces = []
            for block in (block for piece in logical.pieces for block in piece.blocks()):
                source = block.tensor
                copy = self._copies.get((name, block.offsets))
                if copy is None or copy.shape != source.shape:
                    copy = torch.empty(source.shape, dtype=source.dtype, pin_memory=source.is_cuda)
                    self._copies[name, block.offsets] = copy
                copy.copy_(source, non_blocking=True)
                pieces.append(Piece(block.offsets, copy))
            copied[name] = LogicalTensor(logical.shape, logical.dtype, tuple(pieces))
        if self._rank.device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        return copied

    def _write(
        self, tensors: State, state: RunState, started: float, waited_s: float | None = None
    ) -> str | UserError | None:
        """Write a checkpoint; return None, or on all ranks the reason for its failure.

        Args:
            started: when training began to wait.
            waited_s: how long training waited; None if it waits until the end.
        """
        final = checkpoint_path(self._run_dir, state.step)
        try:
            on_rank_zero(lambda: self._prepare(final, state.run), group=self._group)
            write_checkpoint(partial_path(final), tensors, state, group=self._group)
            on_rank_zero(lambda: self._publish(final, state), group=self._group)
        except LostFolderError as error:
            return error  # the content of the folder now belongs to the other job
        except Exception as error:
            if not isinstance(error.__cause__, RankError):  # another rank is gone
                raise
            if self._rank.is_zero:
                remove_partial(self._run_dir)
            if isinstance(error, DivergenceError):
                return DivergenceError(
                    f"{error}, so no checkpoint of it is written; {AGAINST_DIVERGENCE}"
                )
            return f"{error} (rank {error.__cause__.failed_rank})"
        if self._rank.is_zero:
            written_s = time.perf_counter() - started
            log.info(
                "checkpoint at step %d written in %.2f s (training waited %.2f s): %s",
                state.step,
                written_s,
                written_s if waited_s is None else waited_s,
                final,
            )
        return None

    def _prepare(self, final: Location, run: str) -> None:
        self._check_owner()
        make_partial(final, run=run)

    def _publish(self, final: Location, state: RunState) -> None:
        self._check_owner()
        publish(final, run=state.run)
        self._known.add(final)
        keep_newest(final, self._keep, run=state.run, known=self._known, best_step=state.best_step)
        try:
            self._keep_files()
        except OSError as error:
            log.warning("the run's files could not be copied: %s", error)
