"""The steps of a training run: its batches, its pipeline, and how the dense part is computed."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor
from torchrec.datasets.utils import Batch
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.keyed import CombinedOptimizer

from dlrm_sharded.datasets.base import BatchStream
from dlrm_sharded.model.compiled import agree_on_compilation
from dlrm_sharded.model.dlrm import TRIED_DEVICES
from dlrm_sharded.model.sharded_model import asked_of_dense_part, set_dense_part
from dlrm_sharded.ranks.distributed import Rank
from dlrm_sharded.training.metrics import Evaluation
from dlrm_sharded.training.pipeline import CLASSES, evaluate
from dlrm_sharded.training.prefetch import Prefetcher
from dlrm_sharded.training.step_choice import (
    TRIAL_STEPS,
    AskedOptions,
    StepTrial,
    chosen_options,
    first_options,
    untried_options,
)
from dlrm_sharded.training.trainer_config import TrainerConfig

log = logging.getLogger(__name__)


class Steps(AbstractContextManager["Steps"]):
    """Takes the steps of a training run, and chooses during the first ones how the others run.

    On GPUs, `TRIAL_STEPS` of the warm-up are measured if the config leaves an option open.

    Args:
        start_step: number of steps that were taken before.

    Attributes:
        options: how steps run.
    """

    def __init__(
        self,
        model: DistributedModelParallel,
        optimizer: CombinedOptimizer,
        stream: BatchStream,
        config: TrainerConfig,
        rank: Rank,
        *,
        start_step: int,
        num_steps: int,
    ) -> None:
        self._model, self._optimizer, self._stream = model, optimizer, stream
        self._config, self._rank = config, rank
        self._asked = AskedOptions(config.pipeline, *asked_of_dense_part(model))
        is_tried = self._asked.are_open and rank.device.type in TRIED_DEVICES
        self._is_first = True
        self._trial: StepTrial | None = None
        warmup = config.warmup_steps(rank.device)
        if is_tried and TRIAL_STEPS < warmup < num_steps - start_step:
            self._trial = StepTrial(rank)
            self.options = first_options(self._asked)
        else:
            self.options = untried_options(self._asked, rank.device)
            self._set_dense_part()
        self._begin(start_step)

    def __exit__(self, *error: object) -> None:
        self._batches.__exit__(*error)

    def take(self, number: int) -> Tensor:
        """Take the step with this number, and return its loss []."""
        is_first, self._is_first = self._is_first, False
        rests = is_first and self._rank.heartbeat.last is not None
        with self._rank.heartbeat.rest() if rests else nullcontext():  # layers may be compiled
            loss, _, _ = self._pipeline.progress(self._batches)
        if is_first:
            agree_on_compilation(self._model, self._rank.device)
        if self._trial is not None and self._trial.add():
            self._choose(self._trial, number)
            self._trial = None
        return loss

    def take_wait_ms(self) -> float:
        """Return the median time that a step waited for its batch, since the last call."""
        return self._batches.take_wait_ms()

    def evaluate(
        self, stream: BatchStream, num_batches: int, is_stopped: Callable[[], bool] | None
    ) -> Evaluation | None:
        """Evaluate the model on the first batches of a stream, see `pipeline.evaluate`."""
        stream.seek(0)
        batches = Prefetcher(
            itertools.islice(stream, num_batches),
            depth=self._config.prefetch_depth(self._rank.device),
            device=self._rank.device,
            shares_with=self._batches,
        )
        with self._rank.heartbeat.rest():
            return evaluate(
                self._model, self._pipeline, batches, self._rank.device, is_stopped=is_stopped
            )

    def _begin(self, step: int) -> None:
        """Start reading the batches after a step, and make the pipeline that takes them."""
        self._stream.seek(step)
        self._batches = Prefetcher(
            _endless(self._stream),
            depth=self._config.prefetch_depth(self._rank.device),
            device=self._rank.device,
        )
        make = CLASSES[self.options.pipeline]
        self._pipeline = make(self._model, self._optimizer, self._rank.device)
        self._is_first = True

    def _set_dense_part(self) -> None:
        options = self.options
        set_dense_part(self._model, options.compile_mode, dense_graph=options.dense_graph)

    def _choose(self, trial: StepTrial, step: int) -> None:
        """Choose how steps run after this one; a collective of all ranks."""
        times, first = trial.times(), self.options
        self.options = chosen_options(self._asked, times, self._rank.world_size)
        if self._rank.is_zero:
            log.info("%s; chosen: %s", times, self.options)
        self._set_dense_part()
        self._is_first = True
        if self.options.pipeline != first.pipeline:  # then the first one was base
            self._batches.__exit__(None, None, None)
            self._begin(step)


def _endless(batches: Iterable[Batch]) -> Iterator[Batch]:
    while True:
        yield from batches
