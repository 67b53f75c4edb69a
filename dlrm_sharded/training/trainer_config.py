"""The checked config of a training run."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dlrm_sharded.checkpoint.saver import CheckpointConfig
from dlrm_sharded.files.errors import ConfigError, check_count, check_flag
from dlrm_sharded.training.best import IS_BETTER, Best
from dlrm_sharded.training.pipelines import PIPELINES

GPU_PREFETCH_BATCHES = 2
"""Batches that a thread reads ahead for a GPU, by default."""

CPU_WARMUP_STEPS, GPU_WARMUP_STEPS = 5, 35
"""Default numbers of warm-up steps; on a GPU, steps are measured and then compiled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerConfig:
    """Length of a training run, intervals of its logs and evaluations, and how its steps run.

    Args:
        num_steps: number of steps; None trains `num_epochs` epochs.
        eval_every_steps: interval of evaluations; None evaluates after the last step only.
        num_eval_batches: number of batches to evaluate on; None uses the whole validation split.
        keep_best: metric, one of `best.IS_BETTER`, by which the checkpoint of the best evaluation
            is kept; None keeps the newest checkpoints only.
        patience: number of successive evaluations without a better value of the metric `keep_best`
            (by default the AUROC) after which training ends; None trains all steps.
        log_every_steps: interval of logs. Losses stay on the device until the next log, so that
            the host never waits for a step; a loss that is not finite is found then.
        num_warmup_steps: number of first steps that the throughput leaves out; None for 5 on a CPU,
            and 35 on CUDA, of which the first 20 decide how steps run, see `step_choice`.
        prefetch_batches: number of batches that a thread reads ahead, 0 for no thread; None for 2
            on CUDA and 0 on a CPU, whose cores all compute.
        checkpoint: when checkpoints are written; None for never.
        tf32: whether a GPU may round the factors of fp32 matrix products to TF32.
        pipeline: one of `PIPELINES`; None chooses on CUDA, and takes base on a CPU, where nothing
            runs in parallel.
        trace: whether to trace a few steps after the warm-up, see `docs/guide/training.md`.
        trace_steps: number of traced steps.
    """

    num_steps: int | None = None
    num_epochs: int = 1
    eval_every_steps: int | None = None
    num_eval_batches: int | None = None
    keep_best: str | None = None
    patience: int | None = None
    log_every_steps: int = 20
    num_warmup_steps: int | None = None
    prefetch_batches: int | None = None
    pipeline: str | None = None
    tf32: bool = True
    trace: bool = False
    trace_steps: int = 8
    checkpoint: CheckpointConfig | None = None

    def __post_init__(self) -> None:
        for key in ("num_epochs", "log_every_steps", "trace_steps"):
            check_count(f"trainer.{key}", getattr(self, key), least=1)
        for key, least in (
            ("num_steps", 1),
            ("eval_every_steps", 1),
            ("num_eval_batches", 0),
            ("patience", 1),
            ("num_warmup_steps", 0),
            ("prefetch_batches", 0),
        ):
            if getattr(self, key) is not None:
                check_count(f"trainer.{key}", getattr(self, key), least=least)
        check_flag("trainer.trace", self.trace)
        self._check_evaluations()
        if self.pipeline is not None and self.pipeline not in PIPELINES:
            known = ", ".join(PIPELINES)
            raise ConfigError(f"trainer.pipeline is {self.pipeline!r}; known: null, {known}")

    def _check_evaluations(self) -> None:
        if self.keep_best is not None:
            if self.keep_best not in list(IS_BETTER):
                known = ", ".join(IS_BETTER)
                raise ConfigError(f"trainer.keep_best is {self.keep_best!r}; known: null, {known}")
            if self.checkpoint is None or not self.checkpoint.is_enabled:
                raise ConfigError(
                    "trainer.keep_best keeps a checkpoint, and the run writes none; set "
                    "trainer.checkpoint.every_s or trainer.checkpoint.every_steps"
                )
        if self._key_of_best is not None and self.eval_every_steps is None:
            raise ConfigError(
                f"{self._key_of_best} compares evaluations, and there is one at the end only; set "
                "trainer.eval_every_steps"
            )

    @property
    def _key_of_best(self) -> str | None:
        """The key by which the config asks to compare evaluations; None if it does not."""
        key = "trainer.patience" if self.keep_best is None else "trainer.keep_best"
        return None if self.keep_best is None and self.patience is None else key

    def check_validation(self, num_batches: int) -> None:
        """Raise ConfigError if evaluations are compared, but there is no batch to evaluate on."""
        if self._key_of_best and not (num_batches and self.num_eval_batches != 0):
            raise ConfigError(
                f"{self._key_of_best} compares evaluations, and there is no batch to evaluate on; "
                "give validation data, and no trainer.num_eval_batches=0"
            )

    def first_best(self, noted: Best | None) -> Best | None:
        """Return the best evaluation so far, at the start; None if evaluations are not compared.

        Args:
            noted: the best evaluation in the checkpoint; it does not count if its metric differs.
        """
        if self._key_of_best is None:
            return None
        metric = self.keep_best or "auroc"
        return noted if noted is not None and noted.metric == metric else Best(metric)

    def is_patient(self, best: Best | None) -> bool:
        """Return whether training continues, given the best evaluation so far."""
        return best is None or self.patience is None or best.num_worse < self.patience

    def total_steps(self, epoch_batches: int) -> int:
        """Return the number of steps of the whole run."""
        return self.num_steps or self.num_epochs * epoch_batches

    def warmup_steps(self, device: torch.device) -> int:
        """Return the number of warm-up steps on such devices."""
        if self.num_warmup_steps is not None:
            return self.num_warmup_steps
        return GPU_WARMUP_STEPS if device.type == "cuda" else CPU_WARMUP_STEPS

    def pipeline_on(self, device: torch.device) -> str:
        """Return the config's pipeline, or the one to estimate memory for on such devices."""
        return self.pipeline or ("sparse_dist" if device.type == "cuda" else "base")

    def prefetch_depth(self, device: torch.device) -> int:
        """Return the number of batches that a thread reads ahead for ranks on such devices."""
        if self.prefetch_batches is not None:
            return self.prefetch_batches
        return GPU_PREFETCH_BATCHES if device.type == "cuda" else 0
