"""A run on the device that it is for also saves, goes on, exchanges, traces and stops.

The functions are those of `tests/distributed`. On a GPU they meet FBGEMM's kernels and caches,
NCCL, and copies to page-locked memory; results are compared within `CLOSE`, as sums on a GPU, and
those of three ranks, have no fixed order.
"""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR
from torchrec.datasets.utils import Batch

from dlrm_sharded.checkpoint.model_state import model_state
from dlrm_sharded.checkpoint.restore import load_model, load_whole
from dlrm_sharded.checkpoint.saver import CheckpointConfig, Saver
from dlrm_sharded.datasets.base import BatchStream
from dlrm_sharded.datasets.synthetic import SyntheticDataset
from dlrm_sharded.files.errors import PreemptedError
from dlrm_sharded.plans.precision import DEVICE_PRECISIONS, ExchangePrecision
from dlrm_sharded.ranks.distributed import Rank
from dlrm_sharded.training import meeting
from dlrm_sharded.training.checkpoints import Checkpoints
from dlrm_sharded.training.pipelines import PIPELINES
from dlrm_sharded.training.progress import Progress, read_progress
from dlrm_sharded.training.trainer import Trainer, TrainerConfig
from tests.distributed import small_model
from tests.distributed import test_exchanges as exchanges
from tests.distributed import test_half_tables as half
from tests.distributed.small_model import (
    LOCAL_BATCH_SIZE,
    PLANS,
    TABLES,
    make_plan,
    make_sharded,
    pipelines_for,
    shares,
    train_and_evaluate,
)
from tests.distributed.test_checkpoint import check_equal, go_on, load_into, newest, save_trained
from tests.distributed.test_profiler import check_traces, trace_steps
from tests.gpu.devices import NUM_CPU_RANKS, ON_CPU, ON_GPUS, gpus, run_on
from tests.preloaded.ranks import gathered
from tests.unit.checkpoint.cases import run_state

DEVICES = pytest.mark.parametrize("device", [ON_CPU, ON_GPUS])

CLOSE = 1e-5
"""Largest difference, relative and absolute, of what is trained twice."""


def num_ranks_on(device: str) -> int:
    """Return the number of ranks that `run_on` starts."""
    return NUM_CPU_RANKS if device == "cpu" else len(gpus())


def close(expected: Any) -> Any:
    return pytest.approx(expected, rel=CLOSE, abs=CLOSE)


@DEVICES
@pytest.mark.parametrize("kind", ["rows_and_columns", "replicas_and_others"])
def test_goes_on_from_a_checkpoint(device, kind, tmp_path):
    for losses, resumed in run_on(device, go_on, kind, str(tmp_path)):
        assert resumed == close(losses)
    whole, resumed = newest(tmp_path / "whole"), newest(tmp_path / "resumed")
    for name in whole.tensors:
        expected, found = load_whole(whole, name), load_whole(resumed, name)
        torch.testing.assert_close(found, expected, rtol=CLOSE, atol=CLOSE)


@DEVICES
def test_a_checkpoint_loads_under_every_plan(device, tmp_path):
    run_on(device, save_trained, "columns_uneven", "rowwise_adagrad", str(tmp_path))
    run_on(device, load_into, list(PLANS), "rowwise_adagrad", str(tmp_path))
    before = newest(tmp_path)
    assert any(float(load_whole(before, f"tables.{t.name}.weight").abs().max()) for t in TABLES)
    for kind in PLANS:
        check_equal(before, newest(tmp_path / kind))


@DEVICES
def test_half_precision_tables(device, tmp_path):
    kinds = ["columns_uneven", "row_wise", "rows_and_columns"]
    trained = run_on(device, half.train_in_both, kinds)
    half.check_within_rounding(trained, kinds)
    written = half.HALF
    loaded = run_on(device, half.save_and_load, str(tmp_path), written)
    half.check_loaded(loaded, written)


@DEVICES
@pytest.mark.parametrize("kind", ["columns_uneven", "rows_and_columns"])
def test_every_precision_of_exchanges(device, kind, monkeypatch):
    """Also those of which a direction has its own."""
    monkeypatch.setattr(small_model, "LOCAL_BATCH_SIZE", exchanges.NUM_SAMPLES)
    precisions = [
        *(ExchangePrecision(p, p) for p in DEVICE_PRECISIONS[device]),
        ExchangePrecision("fp16", "fp32"),
        ExchangePrecision("fp32", "int8"),
    ]
    assert precisions[0].is_exact
    results = run_on(device, exchanges.trained, kind, precisions)
    exchanges.check_within_rounding(results, precisions, kind, num_ranks_on(device))


def losses_by_pipeline(rank: Rank, kinds: list[str], names: list[str]) -> dict[str, Any]:
    mine = shares(rank)
    return {
        f"{kind}, {name}": train_and_evaluate(rank, kind, mine, pipeline=name)
        for kind in kinds
        for name in names
    }


@DEVICES
def test_replicas_under_every_pipeline(device):
    kinds = ["replicas", "replicas_and_others"]
    names = [name for name in pipelines_for("replicas") if PIPELINES[name].is_exact]
    losses = run_on(device, losses_by_pipeline, kinds, names)
    for kind in kinds:
        for name in names:
            assert losses[f"{kind}, {name}"] == pytest.approx(losses[f"{kind}, base"], rel=1e-5)


@DEVICES
@pytest.mark.parametrize("pipeline", pipelines_for("columns_uneven"))
def test_traces(device, pipeline, tmp_path):
    run_on(device, trace_steps, "columns_uneven", pipeline, tmp_path)
    check_traces(tmp_path, num_ranks_on(device))


class Interrupting(SyntheticDataset):
    """Sends the last rank the signal of a scheduler when it has read a number of batches."""

    is_quiet = True
    num_read = 0

    def batch(self, split: Any, index: int, *, rank: int, world_size: int) -> Batch:
        self.num_read += split == "train"
        if not self.is_quiet and self.num_read == 8 and rank == world_size - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().batch(split, index, rank=rank, world_size=world_size)


def preempt_and_go_on(rank: Rank, folder: str) -> list[Any]:
    """Train undisturbed, then until a signal, then on from its checkpoint, on every rank."""
    meeting.INTERVAL_S = 0.0
    whole = train_run(rank, Path(folder) / "whole", Progress(), is_quiet=True)
    try:
        train_run(rank, Path(folder) / "stopped", Progress(), is_quiet=False)
    except PreemptedError as error:
        said = str(error)
    start = newest(Path(folder) / "stopped")
    resumed = train_run(rank, Path(folder) / "stopped", start, is_quiet=True)
    return gathered(rank, (said, start.state.step, whole, resumed))


def train_run(rank: Rank, folder: Path, start: Any, *, is_quiet: bool) -> float:
    """Train 16 steps; the last loss.

    Args:
        start: progress, or the manifest of a checkpoint.
    """
    kind, embedding = "rows_and_columns", "rowwise_adagrad"
    sharded, optimizer = make_sharded(rank, kind, embedding)
    plan = make_plan(kind, rank.world_size)
    state = model_state(sharded, optimizer, plan, TABLES, embedding_optimizer=embedding)
    if not isinstance(start, Progress):
        load_model(start, state)
        start = read_progress(start, rank, same_plan=True)
    said = {"column_bounds": state.column_bounds, "buffers": state.buffers}
    config = CheckpointConfig(every_steps=100)

    def describe(progress: Progress) -> Any:
        about = {"progress": progress.to_json(), "world_size": rank.world_size}
        return run_state(progress.step, **about, **said)

    saver = Saver(folder, keep=1, background=True, rank=rank)
    dataset = Interrupting(
        TABLES,
        batch_size=LOCAL_BATCH_SIZE * rank.world_size,
        num_train_batches=16,
        num_val_batches=0,
        num_dense=3,
        pregenerate=False,
    )
    dataset.is_quiet = is_quiet
    trainer = Trainer(
        sharded,
        optimizer=optimizer,
        lr_scheduler=LambdaLR(optimizer, lambda step: 1.0),
        train_stream=BatchStream(dataset, "train", rank=rank.rank, world_size=rank.world_size),
        eval_stream=BatchStream(dataset, "val", rank=rank.rank, world_size=rank.world_size),
        config=TrainerConfig(num_steps=16, num_eval_batches=0, num_warmup_steps=0),
        batch_size=dataset.batch_size,
        rank=rank,
        log_scalar=lambda *_: None,
        checkpoints=Checkpoints(saver, config, state, describe=describe, rank=rank),
        start=start,
    )
    return trainer.run().loss


@DEVICES
def test_a_preempted_training_goes_on(device, tmp_path):
    """The last rank alone has the signal; all of them stop after the same step."""
    ends = run_on(device, preempt_and_go_on, str(tmp_path))
    for said, step, whole, resumed in ends:
        assert said.startswith(f"SIGTERM stopped the training after step {step}; its checkpoint")
        assert 1 <= step < 16
        assert resumed == close(whole)
    assert ends == ends[:1] * len(ends)
