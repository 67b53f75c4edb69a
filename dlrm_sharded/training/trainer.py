"""The training loop, with progress, throughput and validation."""

from __future__ import annotations

import logging
import resource
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler
from torchrec.datasets.utils import Batch
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.train_pipeline import (
    TrainPipeline,
    TrainPipelineBase,
    TrainPipelineSparseDist,
)
from torchrec.optim.keyed import CombinedOptimizer
from tqdm import tqdm

from dlrm_sharded.datasets.base import BatchStream
from dlrm_sharded.distributed import Rank, Stopwatch, reported_by_rank_zero
from dlrm_sharded.errors import ConfigError, DivergenceError, check_count
from dlrm_sharded.task import GIB
from dlrm_sharded.training.metrics import Evaluation, Evaluator

log = logging.getLogger(__name__)

CHANCE_MARGIN = 0.01
PIPELINES = ("auto", "base", "sparse_dist")
LogScalar = Callable[[str, float, int], None]
"""Takes a tag, a value and a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerConfig:
    """Length of a training, and intervals of reports and evaluations.

    Args:
        num_steps: None to train `num_epochs` epochs.
        eval_every_steps: None to evaluate after the last step only.
        num_eval_batches: None for the whole validation split.
        log_every_steps: steps between reports; losses stay on the device in between, so that a
            loss that is not finite is found at the next report.
        num_warmup_steps: first steps, which do not count for the throughput.
        pipeline: "base", "sparse_dist" (overlaps the ids' redistribution with the step before), or
            "auto": sparse_dist on CUDA, base on a CPU where there is nothing to overlap with.
    """

    num_steps: int | None = None
    num_epochs: int = 1
    eval_every_steps: int | None = None
    num_eval_batches: int | None = None
    log_every_steps: int = 20
    num_warmup_steps: int = 5
    pipeline: str = "auto"

    def __post_init__(self) -> None:
        for key in ("num_epochs", "log_every_steps"):
            check_count(f"trainer.{key}", getattr(self, key), least=1)
        check_count("trainer.num_warmup_steps", self.num_warmup_steps, least=0)
        for key, least in (("num_steps", 1), ("eval_every_steps", 1), ("num_eval_batches", 0)):
            if getattr(self, key) is not None:
                check_count(f"trainer.{key}", getattr(self, key), least=least)
        if self.pipeline not in PIPELINES:
            raise ConfigError(f"trainer.pipeline is {self.pipeline!r}; known: {PIPELINES}")


@dataclass(frozen=True, slots=True)
class TrainingResult:
    """Results of a training; the throughput is that of all ranks after the warm-up."""

    num_steps: int
    step_ms: float
    samples_per_s: float
    samples_per_s_p10: float
    loss: float
    evaluation: Evaluation
    peak_gib: float


class Trainer:
    """Trains a sharded model on a stream of batches."""

    def __init__(
        self,
        model: DistributedModelParallel,
        *,
        optimizer: CombinedOptimizer,
        lr_scheduler: LRScheduler,
        train_stream: BatchStream,
        eval_stream: BatchStream,
        config: TrainerConfig,
        batch_size: int,
        rank: Rank,
        log_scalar: LogScalar,
    ) -> None:
        self._model = model
        self._lr_scheduler = lr_scheduler
        self._eval_stream = eval_stream
        self._config = config
        self._batch_size = batch_size
        self._rank = rank
        self._log_scalar = log_scalar
        self._num_steps = config.num_steps or config.num_epochs * len(train_stream)
        self._batches = _Timed(_endless(train_stream), pinned=rank.device.type == "cuda")
        self._pipeline = make_pipeline(config.pipeline, model, optimizer, rank.device)
        self._step_ms: list[float] = []
        self._loss = float("nan")
        self._evaluation = Evaluation(auroc=None, normalized_entropy=None, num_samples=0)

    def run(self) -> TrainingResult:
        """Train to the end; all ranks call it together.

        Raises:
            DivergenceError: the loss was not finite; on all ranks alike.
        """
        self._model.train()
        losses: list[Tensor] = []
        watch = self._started_watch()
        with tqdm(total=self._num_steps, unit="step", disable=not self._rank.is_zero) as bar:
            for step in range(self._num_steps):
                loss, _, _ = self._pipeline.progress(self._batches)
                self._lr_scheduler.step()
                losses.append(loss)
                watch.mark()
                num_done = step + 1
                is_last = num_done == self._num_steps
                evaluates = is_last or self._is_every(self._config.eval_every_steps, num_done)
                if evaluates or self._is_every(self._config.log_every_steps, num_done):
                    self._report(num_done, losses, watch.intervals_ms(), bar)
                    losses = []
                    if evaluates:
                        self._evaluate(num_done)
                    watch = self._started_watch()
        return self._result()

    def _report(
        self, num_done: int, losses: list[Tensor], step_ms: list[float], bar: tqdm[None]
    ) -> None:
        """Log the steps since the last report: mean loss over ranks and steps, and speed."""
        mean_losses = torch.stack(losses).float()
        dist.all_reduce(mean_losses)
        mean_losses /= self._rank.world_size
        finite = mean_losses.isfinite()
        if not finite.all():
            first_bad = num_done - len(losses) + int((~finite).nonzero()[0]) + 1
            raise reported_by_rank_zero(
                DivergenceError(
                    f"the loss is {float(mean_losses[~finite][0])} at step {first_bad}; lower "
                    "optimizer.*_learning_rate, warm up longer, or set optimizer.clip_norm"
                )
            )
        self._loss = float(mean_losses.mean())
        skipped = max(0, self._config.num_warmup_steps - (num_done - len(losses)))
        self._step_ms += step_ms[skipped:]
        median_ms = float(np.median(step_ms))
        samples_per_s = self._batch_size / median_ms * 1e3
        self._log_scalar("train/loss", self._loss, num_done)
        self._log_scalar("train/step_ms", median_ms, num_done)
        self._log_scalar("train/samples_per_s", samples_per_s, num_done)
        self._log_scalar("train/data_wait_ms", self._batches.take_wait_ms(), num_done)
        bar.update(len(losses))
        bar.set_postfix_str(f"loss {self._loss:.4f}, {samples_per_s:,.0f} samples/s")

    def _evaluate(self, step: int) -> None:
        num_batches = len(self._eval_stream)
        if self._config.num_eval_batches is not None:
            num_batches = min(num_batches, self._config.num_eval_batches)
        if num_batches == 0:
            return
        self._evaluation = evaluate(
            self._model, self._pipeline, self._eval_stream, num_batches, self._rank.device
        )
        for tag in ("auroc", "normalized_entropy"):
            value = getattr(self._evaluation, tag)
            if value is not None:
                self._log_scalar(f"eval/{tag}", value, step)
        auroc = self._evaluation.auroc
        if self._rank.is_zero and auroc is not None and abs(auroc - 0.5) < CHANCE_MARGIN:
            log.warning(
                "AUROC is %.4f at step %d: the model ranks no better than chance; train longer, or "
                "look at the learning rates and at how labels and features belong together",
                auroc,
                step,
            )

    def _result(self) -> TrainingResult:
        # A run that is all warm-up has no steady step; its throughput stays unknown (nan).
        steps_ms = np.array(self._step_ms or [float("nan")])
        median_ms, slow_ms = np.percentile(steps_ms, [50, 90])
        return TrainingResult(
            num_steps=self._num_steps,
            step_ms=float(median_ms),
            samples_per_s=float(self._batch_size / median_ms * 1e3),
            samples_per_s_p10=float(self._batch_size / slow_ms * 1e3),
            loss=self._loss,
            evaluation=self._evaluation,
            peak_gib=_peak_gib(self._rank),
        )

    def _started_watch(self) -> Stopwatch:
        watch = Stopwatch(self._rank.device)
        watch.mark()
        return watch

    @staticmethod
    def _is_every(interval: int | None, num_done: int) -> bool:
        return interval is not None and num_done % interval == 0


def make_pipeline(
    name: str,
    model: DistributedModelParallel,
    optimizer: CombinedOptimizer,
    device: torch.device,
) -> TrainPipeline[Batch, tuple[Tensor, Tensor, Tensor]]:
    if name == "sparse_dist" or (name == "auto" and device.type == "cuda"):
        return TrainPipelineSparseDist(model, optimizer, device, execute_all_batches=True)
    return TrainPipelineBase(model, optimizer, device)


def evaluate(
    model: DistributedModelParallel,
    pipeline: TrainPipeline[Batch, tuple[Tensor, Tensor, Tensor]],
    stream: BatchStream,
    num_batches: int,
    device: torch.device,
) -> Evaluation:
    """Evaluate the first batches of a stream; the training pipeline keeps its batches in flight."""
    rewritten = isinstance(pipeline, TrainPipelineSparseDist)
    if rewritten:
        pipeline.detach()
    model.eval()
    evaluator = Evaluator(device)
    stream.seek(0)
    with torch.no_grad():
        for _ in range(num_batches):
            _, (_, logits, labels) = model(next(stream).to(device))
            evaluator.update(logits, labels)
    model.train()
    if rewritten:
        pipeline.attach(model)
    return evaluator.compute()


class _Timed(Iterator[Batch]):
    """Counts the time that the loop waits for its next batch.

    Args:
        pinned: batches come in page-locked memory, from which CUDA copies while it computes.
    """

    def __init__(self, batches: Iterator[Batch], *, pinned: bool) -> None:
        self._batches = batches
        self._pinned = pinned
        self._waits_s: list[float] = []

    def __next__(self) -> Batch:
        started = time.perf_counter()
        batch = next(self._batches)
        if self._pinned:
            batch = batch.pin_memory()
        self._waits_s.append(time.perf_counter() - started)
        return batch

    def take_wait_ms(self) -> float:
        """Return the median wait in ms since the last call."""
        waits_s, self._waits_s = self._waits_s, []
        return 1e3 * float(np.median(waits_s)) if waits_s else 0.0


def _endless(batches: Iterable[Batch]) -> Iterator[Batch]:
    while True:
        yield from batches


def _peak_gib(rank: Rank) -> float:
    """Return the largest peak memory of a rank: of its device on CUDA, of its process on a CPU."""
    if rank.device.type == "cuda":
        peak_bytes = torch.cuda.max_memory_allocated(rank.device)
    else:
        peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    peak = torch.tensor(float(peak_bytes), device=rank.device)
    dist.all_reduce(peak, dist.ReduceOp.MAX)
    return float(peak) / GIB
