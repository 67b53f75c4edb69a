"""Every pipeline trains as `base` does, and resumes what it would have done."""

import contextlib
import itertools
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
from torch.optim.lr_scheduler import LambdaLR
from torchrec.datasets.utils import Batch

from dlrm_sharded.checkpoint.restore import load_model
from dlrm_sharded.checkpoint.saver import CheckpointConfig, Saver
from dlrm_sharded.datasets.id_check import IdCheck
from dlrm_sharded.files.errors import PreemptedError
from dlrm_sharded.model.fused_lookups import fused_lookups, set_fused_steps
from dlrm_sharded.ranks.distributed import Rank
from dlrm_sharded.training import meeting
from dlrm_sharded.training.checkpoints import Checkpoints
from dlrm_sharded.training.pipeline import CLASSES
from dlrm_sharded.training.pipelines import PIPELINES
from dlrm_sharded.training.progress import Progress, read_progress
from dlrm_sharded.training.trainer_config import TrainerConfig
from tests.distributed.small_model import make_sharded, run_trainer, shares, train_and_evaluate
from tests.distributed.test_checkpoint import built, newest
from tests.preloaded.ranks import run_ranks
from tests.unit.checkpoint.cases import run_state

pytestmark = pytest.mark.slow

KIND, REPLICATED = "rows_and_columns", "replicas_and_others"
"""Kinds of plans."""

NUM_STEPS = 9
EMBEDDING = "rowwise_adagrad"


def train(rank: Rank) -> dict[str, tuple[list[float], int]]:
    """Losses of all batches until they end, and the number of lookups that are taken hold of."""
    return {name: _train(rank, name) for name in PIPELINES}


def _train(rank: Rank, name: str) -> tuple[list[float], int]:
    sharded, optimizer = make_sharded(rank, "columns_uneven", "sgd")
    batches, losses = iter(shares(rank)), []
    with contextlib.suppress(StopIteration):
        pipeline = CLASSES[name](sharded, optimizer, rank.device)
        while True:
            losses.append(float(pipeline.progress(batches)[0]))
    return losses, len(getattr(pipeline, "_pipelined_modules", []))


def test_takes_hold_of_the_lookup_and_ends_with_the_batches():
    found = run_ranks(train, 2)
    losses, num_pipelined = found["base"]
    assert num_pipelined == 0
    assert found["sparse_dist"] == (losses, 1)


def train_on_with_an_evaluation(rank: Rank, kind: str) -> list[list[float]]:
    stream = list(itertools.islice(itertools.cycle(shares(rank)), NUM_STEPS))
    return [train_and_evaluate(rank, kind, stream, pipeline=name) for name in PIPELINES]


@pytest.mark.parametrize(("kind", "world_size"), [(KIND, 1), (KIND, 2), ("empty_rank", 2)])
def test_losses_are_those_of_base(kind, world_size):
    base, sparse_dist = run_ranks(train_on_with_an_evaluation, world_size, kind)
    assert sparse_dist == base


class Stream(Iterator[Batch]):
    """Batches of a rank in the place of a dataset's."""

    def __init__(self, batches: list[Batch]) -> None:
        self._batches = batches
        self._next = 0
        self.check = IdCheck((), "ignore")

    def __len__(self) -> int:
        return len(self._batches)

    def __next__(self) -> Batch:
        self._next += 1
        return self._batches[(self._next - 1) % len(self._batches)]

    def seek(self, step: int) -> None:
        self._next = step


class Run:
    """A training of a small model with evaluations and checkpoints, as a job has it."""

    def __init__(self, rank: Rank, name: str, folder: Path, kind: str = KIND) -> None:
        self._rank, self._name, self._folder = rank, name, folder
        self._model, self._optimizer, self.state = built(rank, kind, EMBEDDING)
        self.losses: list[float] = []

    def load(self) -> Progress:
        manifest = newest(self._folder)
        load_model(manifest, self.state)
        set_fused_steps(self._model, manifest.state.step)
        return read_progress(manifest, self._rank, same_plan=True)

    def train(self, num_steps: int, start: Progress) -> None:
        checkpoint = CheckpointConfig(every_steps=4, every_s=None)
        said = {
            "column_bounds": self.state.column_bounds,
            "buffers": self.state.buffers,
            "world_size": self._rank.world_size,
        }
        saver = Saver(self._folder, keep=9, background=True, rank=self._rank)
        config = TrainerConfig(
            num_steps=num_steps,
            checkpoint=checkpoint,
            pipeline=self._name,
            eval_every_steps=3,
            log_every_steps=1,
            num_warmup_steps=0,
        )
        parts = {
            "lr_scheduler": LambdaLR(self._optimizer, lambda step: 1 / (1 + step)),
            "train_stream": Stream(shares(self._rank)),
            "eval_stream": Stream(shares(self._rank)[:2]),
            "log_scalar": self._log,
            "checkpoints": Checkpoints(
                saver,
                checkpoint,
                self.state,
                describe=lambda progress: run_state(
                    progress.step, progress=progress.to_json(), **said
                ),
                rank=self._rank,
            ),
            "start": start,
        }
        run_trainer(self._rank, self._model, self._optimizer, config, **parts)
        assert saver.failure is None

    def num_lookups(self) -> list[float]:
        return [float(kernel.emb_module.iter_cpu) for kernel in fused_lookups(self._model)]

    def _log(self, tag: str, value: float, step: int) -> None:
        if tag in ("train/loss", "eval/normalized_entropy"):
            self.losses.append(value)


def whole_and_resumed(rank: Rank, name: str, folder: str) -> list[list[float]]:
    """Figures of a run, and of one that ends after its second checkpoint and is resumed."""
    whole = Run(rank, name, Path(folder) / "whole")
    whole.train(11, Progress())
    first = Run(rank, name, Path(folder) / "parts")
    first.train(8, Progress())
    second = Run(rank, name, Path(folder) / "parts")
    second.train(11, second.load())
    # step 8 is the last one of the first run, which therefore evaluates there
    losses = [whole.losses, [*first.losses[:-1], *second.losses]]
    return [of_run + run.num_lookups() for of_run, run in zip(losses, (whole, second), strict=True)]


@pytest.mark.parametrize("name", PIPELINES)
def test_a_resumed_run_goes_on_as_the_whole_one(name, tmp_path):
    """Its losses, and the steps that Adam's lookups have counted."""
    whole, resumed = run_ranks(whole_and_resumed, 2, name, str(tmp_path))
    assert resumed == whole
    assert len(whole) == 11 + 4 + 2
    assert 11 <= whole[-1] <= 12


def preempted(rank: Rank, name: str, folder: str) -> list[list[float]]:
    """Figures of a run with `base` and the pipeline, one that a signal stops, and its rest."""
    path = Path(folder)
    kind = REPLICATED if name == "base" else KIND
    base = Run(rank, "base", path / "base", kind)
    base.train(9, Progress())
    whole = Run(rank, name, path / "whole", kind)
    whole.train(9, Progress())
    first = Run(rank, name, path / "stopped", kind)
    log = first._log

    def stop(tag: str, value: float, step: int) -> None:
        log(tag, value, step)
        if tag == "train/loss" and step == 4:  # is logged after step 5
            os.kill(os.getpid(), signal.SIGTERM)

    every_batch = patch.object(meeting, "MOST_BATCHES", 1)
    with every_batch, patch.object(first, "_log", stop), pytest.raises(PreemptedError):
        first.train(9, Progress())
    second = Run(rank, name, path / "stopped", kind)
    second.train(9, second.load())
    return [base.losses, whole.losses, first.losses, second.losses]


@pytest.mark.parametrize("name", PIPELINES)
def test_a_signal_stops_a_run_that_goes_on(name, tmp_path):
    base, whole, before, after = run_ranks(preempted, 2, name, str(tmp_path))
    assert 5 <= len(before) < len(whole) == len(before) + len(after)
    assert before == whole[: len(before)]
    assert before + after == whole == base
