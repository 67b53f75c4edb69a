"""The training loop, with its progress bar, throughput and validation."""

from __future__ import annotations

import functools
import logging
import math
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.keyed import CombinedOptimizer

from dlrm_sharded.datasets.base import BatchStream
from dlrm_sharded.datasets.id_check import IdFault
from dlrm_sharded.files.errors import AGAINST_DIVERGENCE, DivergenceError
from dlrm_sharded.files.progress_bar import ProgressBar
from dlrm_sharded.model.dense_graph import release_graphs
from dlrm_sharded.ranks.agreement import as_reported_by_rank_zero, on_rank_zero
from dlrm_sharded.ranks.distributed import Rank
from dlrm_sharded.ranks.machine_load import LoadWatch, MachineLoad
from dlrm_sharded.training.checkpoints import Checkpoints
from dlrm_sharded.training.id_report import IdReport
from dlrm_sharded.training.metrics import log_evaluation
from dlrm_sharded.training.pipeline import set_schedule_step
from dlrm_sharded.training.profiler import StepProfiler, make_profiler
from dlrm_sharded.training.progress import Progress
from dlrm_sharded.training.steady_steps import SteadySteps
from dlrm_sharded.training.steps import Steps
from dlrm_sharded.training.trainer_config import TrainerConfig
from dlrm_sharded.training.training_result import TrainingResult, peak_memory_gib
from dlrm_sharded.training.window import ClosedWindow, Window

log = logging.getLogger(__name__)

LogScalar = Callable[[str, float, int], None]
"""Logs a value: its tag, the value and the step."""


@dataclass(eq=False)
class Trainer:
    """Trains a sharded model on a stream of batches.

    Args:
        checkpoints: writes checkpoints; None for none.
        start: the state from which training continues.
        trace_folder: folder of the ranks' traces, if the config asks for them.
    """

    model: DistributedModelParallel
    _: KW_ONLY
    optimizer: CombinedOptimizer
    lr_scheduler: LRScheduler
    train_stream: BatchStream
    eval_stream: BatchStream
    config: TrainerConfig
    batch_size: int
    rank: Rank
    log_scalar: LogScalar
    checkpoints: Checkpoints | None = None
    start: Progress = field(default_factory=Progress)
    trace_folder: Path | None = None

    def __post_init__(self) -> None:
        config, rank, start = self.config, self.rank, self.start
        self._best = config.first_best(start.best)
        self._num_steps = config.total_steps(len(self.train_stream))
        if start.step < self._num_steps:
            self._end_if_impatient(start.step)
        set_schedule_step(self.lr_scheduler, start.step)
        self._steps = Steps(
            self.model,
            self.optimizer,
            self.train_stream,
            config,
            rank,
            start_step=start.step,
            num_steps=self._num_steps,
        )
        self._profiler: StepProfiler | None = None
        if config.trace and self.trace_folder is not None:
            self._profiler = make_profiler(
                self.model,
                config,
                rank,
                self.trace_folder,
                start_step=start.step,
                num_steps=self._num_steps,
            )
        self._unread: deque[ClosedWindow] = deque()
        self._steady = SteadySteps(
            start, num_warmup=config.warmup_steps(rank.device), num_steps=self._num_steps
        )
        self._loss = start.loss
        self._evaluation = start.evaluation
        self._evaluated_step = start.evaluated_step
        self._ids = IdReport(rank, start.ids_out_of_range)

    def run(self) -> TrainingResult:
        """Train to the end; all ranks call this together.

        Raises:
            DataError: ids of a batch cannot be trained; all ranks raise it.
            DivergenceError: a loss, prediction or saved weight was not finite; all ranks raise it.
        """
        torch.backends.cuda.matmul.allow_tf32 = self.config.tf32
        self.model.train()
        watch = LoadWatch(self.rank.device)
        # A False would show the bar to users who set TQDM_DISABLE.
        hidden = {} if self.rank.is_zero else {"disable": True}
        with ExitStack() as stack:
            stack.callback(release_graphs, self.model)  # after an error, its frames hold the model
            bar = stack.enter_context(
                ProgressBar(total=self._num_steps, initial=self.start.step, unit="step", **hidden)
            )
            stack.enter_context(self._steps)
            if self._profiler is not None:
                stack.enter_context(self._profiler)
            if self.checkpoints is not None:
                stack.enter_context(self.checkpoints)
            stack.callback(self.rank.heartbeat.end)
            self._train(bar)
        return self._result(watch.conclude())

    def _train(self, bar: ProgressBar) -> None:
        first_step = self.start.step - len(self.start.window_losses)
        self._steady.begin()
        self._make_up_for_evaluation()
        earlier = list(self.start.window_losses.to(self.rank.device))
        window = Window(first_step, self.rank, earlier=earlier)
        for num_done in range(self.start.step + 1, self._num_steps + 1):
            self._steady.before_step(num_done)
            if self._profiler is not None and num_done == self._profiler.steps[0]:
                window = self._next_window(num_done - 1, window)
                self._profiler.start()
            loss = self._steps.take(num_done)
            self.lr_scheduler.step()
            self.rank.heartbeat.beat(num_done)
            window.add(loss)
            if self._profiler is not None and num_done in self._profiler.steps:
                window = self._profiled(self._profiler, num_done, window)
            evaluates = self._evaluates(num_done)
            if evaluates or self._is_every(self.config.log_every_steps, num_done):
                window = self._next_window(num_done, window)
                self._report(bar, num_unread=0 if evaluates else 1)
            self._steady.after_step(num_done)
            if evaluates:
                self._evaluate(num_done)
                window = Window(num_done, self.rank)
            self._checkpoint(num_done, window, bar)
            if num_done == self._num_steps:  # perhaps by the evaluation
                break

    def _profiled(self, profiler: StepProfiler, step: int, window: Window) -> Window:
        """End a profiled step; return the next window, which begins after the trace is written."""
        if step != profiler.steps[-1]:
            profiler.step()
            return window
        if window.num_steps:
            self._close(window, step)
        with self.rank.heartbeat.rest():
            profiler.stop()
        return Window(step, self.rank)

    def _next_window(self, step: int, window: Window) -> Window:
        """Close a window after a step, unless it is empty, and return the next one."""
        if not window.num_steps:
            return window
        self._close(window, step)
        return window.following()

    def _close(self, window: Window, step: int) -> None:
        is_traced = self._profiler is not None and step in self._profiler.steps
        waited_ms = self._steps.take_wait_ms()
        self._unread.append(
            ClosedWindow(
                window,
                data_wait_ms=waited_ms,
                is_traced=is_traced,
                faults=self.train_stream.check.take(step),
            )
        )

    def _make_up_for_evaluation(self) -> None:
        """Evaluate the step at which the run resumes, if a signal interrupted that evaluation."""
        step = self.start.step
        if step and self._evaluates(step) and self._evaluated_step != step:
            self._evaluate(step)
            # The evaluation may be interrupted again, or be the best one, or the last one.
            if self._evaluated_step != step or self._best is not None:
                self._checkpoint(step, Window(step, self.rank), None)

    def _checkpoint(self, step: int, window: Window, bar: ProgressBar | None) -> None:
        """Write a checkpoint if one is due, and end training if a signal asks for it."""
        if self.checkpoints is not None:
            self.checkpoints.after_step(
                step,
                is_complete=step == self._num_steps == self._evaluated_step,
                is_best=bool(self.config.keep_best and self._best and self._best.step == step),
                progress=functools.partial(self._progress, bar, step, window),
            )

    def _progress(self, bar: ProgressBar | None, step: int, window: Window) -> Progress:
        """Log what is not logged yet, and return the training state after a step."""
        self._report(bar, num_unread=0)
        if window.num_steps:
            self._finite_losses(ClosedWindow(window, faults=self.train_stream.check.take(step)))
        steady_s = self._steady.seconds()
        return Progress(
            step=step,
            loss=self._loss,
            evaluation=self._evaluation,
            evaluated_step=self._evaluated_step,
            best=self._best,
            steady_s=0.0 if math.isnan(steady_s) else steady_s,
            window_losses=window.losses,
            step_ms=torch.tensor(self._steady.step_ms),
            ids_out_of_range=dict(self._ids.counts),
        )

    def _report(self, bar: ProgressBar | None, *, num_unread: int) -> None:
        """Log the windows that are not read yet, except the last `num_unread`."""
        while len(self._unread) > num_unread:
            window = self._unread.popleft()
            losses = self._finite_losses(window)
            self._loss = float(losses.mean())
            step = window.first_step + len(losses)
            self.log_scalar("train/loss", self._loss, step)
            self.log_scalar("train/data_wait_ms", window.data_wait_ms, step)
            if window.is_traced:  # the profiler slows these steps down
                continue
            step_ms = window.step_ms()
            warm_step = self.start.step + self.config.warmup_steps(self.rank.device)
            self._steady.step_ms += step_ms[max(0, warm_step - window.first_timed_step) :]
            median_ms = float(np.median(step_ms))
            samples_per_s = self.batch_size / median_ms * 1e3
            self.log_scalar("train/step_ms", median_ms, step)
            self.log_scalar("train/samples_per_s", samples_per_s, step)
            if bar is not None:
                bar.update(step - bar.n)
                bar.set_postfix_str(f"loss {self._loss:.4f}, {samples_per_s:,.0f} samples/s")

    def _finite_losses(self, window: ClosedWindow) -> Tensor:
        """Report faults of a window's ids, and return the losses of its steps, averaged over ranks.

        Raises:
            DataError: ids are wrong in a way that must end training; on all ranks.
            DivergenceError: a loss is not finite; on all ranks.
        """
        losses = window.mean_losses()
        if window.has_faults():
            self._report_ids("at step", window.faults, window.first_step + len(losses))
        finite = losses.isfinite()
        if finite.all():
            return losses
        first_bad = window.first_step + int((~finite).nonzero()[0]) + 1
        message = f"the loss is {float(losses[~finite][0])} at step {first_bad}"
        if 0 < self.start.step == first_bad - 1:  # this process has not changed the weights yet
            message += (
                f", the first one after the checkpoint at step {self.start.step}; if that holds "
                "the weights of a step that was too large, move it away to go on from the one "
                "before it"
            )
        raise as_reported_by_rank_zero(DivergenceError(f"{message}; {AGAINST_DIVERGENCE}"))

    def _report_ids(self, place: str, faults: Sequence[tuple[int, IdFault]], step: int) -> None:
        if self._ids.gather([(f"{place} {number + 1}", fault) for number, fault in faults]):
            self.log_scalar("data/ids_out_of_range", self._ids.counts.total(), step)

    def _evaluate(self, step: int) -> None:
        num_batches = len(self.eval_stream)
        if self.config.num_eval_batches is not None:
            num_batches = min(num_batches, self.config.num_eval_batches)
        if num_batches == 0:
            self._evaluated_step = step
            return
        is_stopped = self.checkpoints.stops_evaluation if self.checkpoints else None
        evaluation = self._steps.evaluate(self.eval_stream, num_batches, is_stopped)
        self._report_ids("in validation batch", self.eval_stream.check.take(num_batches), step)
        if evaluation is None:
            return
        self._evaluation, self._evaluated_step = evaluation, step
        for tag in ("auroc", "normalized_entropy", "loss", "calibration"):
            value = getattr(evaluation, tag)
            if value is not None:
                self.log_scalar(f"eval/{tag}", value, step)
        if self.rank.is_zero:
            log_evaluation(evaluation, step)
        if (before := self._best) is not None:  # ranks on unlike hosts may differ in a last digit
            self._best = on_rank_zero(lambda: before.after(evaluation, step))
            if step < self._num_steps and self._end_if_impatient(step):
                self._steady.end_early(step)

    def _end_if_impatient(self, step: int) -> bool:
        """End training at a step, and return True, if the last evaluations were no better."""
        if self.config.is_patient(self._best):
            return False
        self._num_steps = step
        if self.rank.is_zero:
            text = "the training ends after step %d: trainer.patience=%d evaluations in a row were "
            log.info(f"{text}not better; %s", step, self.config.patience, self._best)
        return True

    def _result(self, machine_load: MachineLoad) -> TrainingResult:
        median_ms = self._steady.percentile_ms(50)
        overall, of_slow_ones = self._steady.samples_per_s(self.batch_size)
        peak_gib, reserved_gib = peak_memory_gib(self.rank)
        return TrainingResult(
            num_steps=self._num_steps,
            options=self._steps.options,
            step_ms=median_ms,
            samples_per_s=self.batch_size / median_ms * 1e3,
            samples_per_s_p10=of_slow_ones,
            samples_per_s_overall=overall,
            loss=self._loss,
            evaluation=self._evaluation,
            best=self._best,
            peak_gib=peak_gib,
            reserved_gib=reserved_gib,
            machine_load=machine_load,
            ids_out_of_range=dict(self._ids.counts),
            unsaved=self.checkpoints.failure if self.checkpoints else None,
        )

    def _evaluates(self, num_done: int) -> bool:
        is_last = num_done == self._num_steps
        return is_last or self._is_every(self.config.eval_every_steps, num_done)

    @staticmethod
    def _is_every(interval: int | None, num_done: int) -> bool:
        return interval is not None and num_done % interval == 0
