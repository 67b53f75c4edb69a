"""The loop around a pipeline: what it logs and when, in a job of one process."""

import math
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torchrec.datasets.utils import Batch

from dlrm_sharded.datasets.base import Split
from dlrm_sharded.datasets.synthetic import SyntheticDataset
from dlrm_sharded.files.errors import DataError, DivergenceError, PreemptedError
from dlrm_sharded.training import steps as steps_module
from dlrm_sharded.training.metrics import Evaluation
from dlrm_sharded.training.profiler import StepProfiler, make_profiler
from dlrm_sharded.training.progress import Progress
from dlrm_sharded.training.trainer import TrainerConfig
from tests.unit.checkpoint.cases import STATE, checkpoints_of_run, write
from tests.unit.training.conftest import BATCH_SIZE, Events


def test_reads_losses_one_log_late(train):
    """The device has time until the next log; at the end nothing is left unread."""
    events = Events()
    result = train(events, num_steps=7, log_every_steps=3)
    # the mean loss of the steps 1 to 3 is 2, that of 4 to 6 is 5
    assert events.seen == [1, 2, 3, 4, 5, 6, (3, 2.0), 7, (6, 5.0), (7, 7.0)]
    assert result.loss == 7.0


def test_logs_samples_of_a_second(train):
    events = Events()
    train(events, num_steps=4, log_every_steps=2)
    step_ms, samples_per_s = map(np.array, events.speeds.values())
    assert samples_per_s * step_ms / 1e3 == pytest.approx([BATCH_SIZE] * 2, rel=1e-9)


class OneIdBeyond(SyntheticDataset):
    """In each second batch, the last id is larger than the table."""

    def batch(self, split: Split, index: int, **share: int) -> Batch:
        batch = super().batch(split, index, **share)
        if index % 2:
            batch.sparse_features.values()[-1] = 70
        return batch


def test_ids_beyond_a_table_are_counted_and_reported_once(train, monkeypatch, caplog):
    """Batch 1 of 3 has one in every epoch, and so has the validation."""

    def evaluate(
        model: object, pipeline: object, batches: Iterator[Batch], *_: object, **__: object
    ):
        return Evaluation(0.75, 0.5, num_samples=len(list(batches)))

    monkeypatch.setattr(steps_module, "evaluate", evaluate)
    options = {"log_every_steps": 2, "kind": OneIdBeyond, "num_val_batches": 2}
    result = train(Events(), num_steps=8, **options)
    assert result.ids_out_of_range == {"t": 4}
    assert [record.message for record in caplog.records if "beyond" in record.message] == [
        "feature 't' of table 't' has ids beyond its 10 rows (1, up to 70), at step 2 on rank 0; "
        "row 0 is looked up for them, and the next ones are counted only (ids_out_of_range in "
        "result.json; data.bounds=error ends the run)"
    ]


def test_ids_of_later_batches_are_counted_where_a_run_goes_on(train):
    start = Progress(step=4, ids_out_of_range={"t": 7})
    result = train(Events(), start=start, num_steps=6, kind=OneIdBeyond)
    assert result.ids_out_of_range == {"t": 8}


def test_ids_beyond_a_table_can_end_the_training(train):
    with pytest.raises(DataError, match=r"beyond its 10 rows \(1, up to 70\), at step 2 on rank 0"):
        train(Events(), num_steps=8, log_every_steps=2, kind=OneIdBeyond, bounds="error")


def test_evaluation_waits_for_all_logs(train):
    events = Events()
    train(events, num_steps=4, log_every_steps=1, eval_every_steps=3)
    assert events.seen == [1, 2, (1, 1.0), 3, (2, 2.0), (3, 3.0), 4, (4, 4.0)]


INTERRUPTED = {"eval_every_steps": 3, "num_steps": 4, "num_val_batches": 1}
"""Settings of a training that goes on after step 3, whose evaluation a signal has interrupted."""


def test_a_missed_evaluation_is_done_later(train, monkeypatch):
    evaluations = [Evaluation(0.75, 0.5, 8), Evaluation(0.875, 0.25, 8)]
    evaluate = Mock(side_effect=evaluations)
    monkeypatch.setattr(steps_module, "evaluate", evaluate)
    result = train(Events(), start=Progress(step=3), **INTERRUPTED)
    assert evaluate.call_count == 2
    assert result.evaluation == evaluations[1]


def test_steps_beat_and_evaluations_rest(train, rank, monkeypatch):
    """So no stall is said of an evaluation, nor of what comes before and after the training."""
    beats = []

    class Beating(Events):
        def progress(self, batches: Iterator[Batch]) -> tuple[Tensor, None, None]:
            beats.append(rank.heartbeat.last and rank.heartbeat.last.step)
            return super().progress(batches)

    def evaluate(*args: object, **kwargs: object) -> Evaluation:
        assert rank.heartbeat.last is None
        return Evaluation(0.75, 0.5, 8)

    monkeypatch.setattr(steps_module, "evaluate", evaluate)
    train(Beating(), num_steps=4, eval_every_steps=2, num_val_batches=1)
    assert beats == [None, 1, 2, 3]
    assert rank.heartbeat.last is None


def test_an_evaluation_that_is_interrupted_again_ends_the_training(
    train, rank, tmp_path, monkeypatch
):
    def interrupt(*args, **kwargs):
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(steps_module, "evaluate", interrupt)
    checkpoints = checkpoints_of_run(tmp_path, rank, STATE, in_background=False, every_steps=100)
    events = Events()
    with pytest.raises(PreemptedError, match="stopped the training after step 3;"):
        train(events, checkpoints=checkpoints, start=Progress(step=3), **INTERRUPTED)
    assert events.seen == []
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-0000000003"]


@pytest.mark.parametrize("bad_step", [1, 3, 4, 7])
def test_divergence_names_its_step(bad_step, train):
    events = Events(lambda number: float("nan") if number >= bad_step else 1.0)
    with pytest.raises(DivergenceError, match=rf"the loss is nan at step {bad_step};"):
        train(events, num_steps=7, log_every_steps=3)


@pytest.mark.parametrize("due", ["interval", "signal"])
def test_a_loss_that_is_not_finite_is_never_followed_by_a_checkpoint(due, train, rank, tmp_path):
    """The next log would be much later, and the weights here stay finite."""

    def step(number: int) -> float:
        if due == "signal" and number == 4:
            os.kill(os.getpid(), signal.SIGTERM)
        return math.nan if number == 3 else 1.0

    write(tmp_path, rank, 1)
    checkpoints = checkpoints_of_run(
        tmp_path,
        rank,
        STATE,
        in_background=False,
        every_steps=5 if due == "interval" else 100,
        keep=1,
    )
    steps = {"num_steps": 5000, "log_every_steps": 10_000}
    with pytest.raises(DivergenceError, match="the loss is nan at step 3;"):
        train(Events(step), checkpoints=checkpoints, **steps)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-0000000001"]


def test_weights_that_cannot_be_trained_on(train):
    """A step may leave weights that are finite and too large for the next one."""
    with pytest.raises(DivergenceError, match="the first one after the checkpoint at step 3; if"):
        train(Events(lambda _: math.nan), start=Progress(step=3), num_steps=7)


@pytest.mark.parametrize("warmup", [0, 2])
def test_overall_throughput_has_the_stalls(warmup, train):
    """One step of 9 waits for half a second, which a median does not show."""

    def step(number: int) -> float:
        time.sleep(0.5 if number == 6 else 1e-3)
        return 1.0

    result = train(Events(step), num_steps=9, num_warmup_steps=warmup)
    assert 0 < result.samples_per_s_overall < (9 - warmup) * BATCH_SIZE / 0.5
    assert result.samples_per_s > result.samples_per_s_overall


@pytest.mark.parametrize("may_round", [True, False])
def test_products_on_gpus_may_round(may_round, train, tf32):
    """How torch multiplies fp32 matrices on GPUs."""
    tf32(not may_round)
    train(Events(), num_steps=1, tf32=may_round)
    assert tf32() == may_round


@pytest.mark.parametrize(
    ("prefetch_batches", "device", "depth"),
    [(None, "cuda", 2), (None, "cpu", 0), (0, "cuda", 0), (3, "cpu", 3)],
)
def test_reads_ahead_where_cores_are_free(prefetch_batches, device, depth):
    config = TrainerConfig(prefetch_batches=prefetch_batches)
    assert config.prefetch_depth(torch.device(device)) == depth


@pytest.mark.parametrize(
    ("start", "warmup", "total", "traced", "said"),
    [
        (0, 5, 14, range(6, 15), None),
        (50, 5, 100, range(56, 65), None),
        (0, 0, 100, range(1, 10), None),
        (0, 5, 13, range(6, 14), "7 of 8 steps are traced"),
        (0, 5, 7, range(6, 8), "1 of 8 steps"),
        (0, 5, 6, None, "0 of 8 steps"),
        (100, 5, 100, None, "0 of 8 steps"),
    ],
)
def test_traces_the_steps_after_the_warm_up(start, warmup, total, traced, said, rank, caplog):
    """In the first step after those of the warm-up, the profiler starts."""
    config = TrainerConfig(num_warmup_steps=warmup)
    profiler = make_profiler(
        nn.Linear(1, 1), config, rank, Path("trace"), start_step=start, num_steps=total
    )
    assert (profiler and profiler.steps) == traced
    assert (said or "") in caplog.text
    assert bool(caplog.text) == (said is not None)
    if said:
        assert f"trainer.num_steps to at least {start + warmup + 9}" in caplog.text


def test_a_trace_that_cannot_be_written_is_lost(rank, tmp_path, caplog):
    folder = tmp_path / "trace"
    folder.write_text("a file")
    StepProfiler(nn.Linear(1, 1), range(1, 3), rank, folder)._write(Mock())
    assert f"the trace is lost: {folder / 'rank0.json.gz'} cannot be written" in caplog.text


def test_ranks_agree_after_a_first_step_on_what_is_compiled(train, monkeypatch):
    events, at = Events(), []

    def agree(model: nn.Module, device: torch.device) -> None:
        at.append(list(events.seen))

    monkeypatch.setattr(steps_module, "agree_on_compilation", agree)
    train(events, num_steps=7, start=Progress(step=3))
    assert at == [[1]]
