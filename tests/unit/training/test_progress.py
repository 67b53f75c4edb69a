"""What a trainer remembers across an interruption."""

import dataclasses
import math
import random
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import LambdaLR

from dlrm_sharded.checkpoint.manifest import read_manifest
from dlrm_sharded.model.optimizers import Schedule
from dlrm_sharded.ranks.distributed import Rank
from dlrm_sharded.training.best import Best
from dlrm_sharded.training.metrics import Evaluation
from dlrm_sharded.training.pipeline import set_schedule_step
from dlrm_sharded.training.progress import Progress, read_progress
from dlrm_sharded.training.window import ClosedWindow, Window
from tests.unit.checkpoint.cases import write

PROGRESS = Progress(
    step=5,
    loss=0.25,
    evaluation=Evaluation(0.75, 0.5, num_samples=8, loss=0.375, calibration=1.25),
    evaluated_step=4,
    best=Best("loss", 0.25, step=2, num_worse=1),
    steady_s=2.5,
    window_losses=torch.tensor([0.5, 0.125]),
    step_ms=torch.tensor([8.0, 9.0]),
    ids_out_of_range={"user.id": 3},
)


def read_again(progress: Progress, folder: Path, rank: Rank, *, same_plan: bool) -> Progress:
    tensors, fields = progress.tensors(rank), progress.to_json()
    path = write(folder, rank, progress.step, state=tensors, progress=fields)
    return read_progress(read_manifest(path), rank, same_plan=same_plan)


def test_is_the_same_again(tmp_path, rank):
    again = read_again(PROGRESS, tmp_path, rank, same_plan=True)
    assert again.to_json() == PROGRESS.to_json()
    assert again.step == 5
    assert (again.evaluation, again.best) == (PROGRESS.evaluation, PROGRESS.best)
    assert again.ids_out_of_range == {"user.id": 3}
    assert again.window_losses.tolist() == [0.5, 0.125]
    assert again.step_ms.tolist() == [8.0, 9.0]


def test_progress_of_earlier_versions(tmp_path, rank):
    """They did not note what is new in 0.4."""
    fields = PROGRESS.to_json()
    del fields["best"], fields["evaluation"]["loss"], fields["evaluation"]["calibration"]
    path = write(tmp_path, rank, state=PROGRESS.tensors(rank), progress=fields)
    again = read_progress(read_manifest(path), rank, same_plan=True)
    assert again.evaluation == Evaluation(0.75, 0.5, num_samples=8)
    assert (again.evaluated_step, again.best) == (4, None)


def test_times_belong_to_a_plan(tmp_path, rank):
    again = read_again(PROGRESS, tmp_path, rank, same_plan=False)
    assert again.step_ms.tolist() == []
    assert again.window_losses.tolist() == [0.5, 0.125]


@pytest.mark.parametrize(
    ("rank_of", "world_size", "losses"),
    [(0, 2, [0.5, 0.125]), (1, 2, [2.5, 4.125]), (0, 1, [1.5, 2.125])],
)
def test_losses_belong_to_a_rank_or_are_averaged(tmp_path, rank, rank_of, world_size, losses):
    """Two ranks have written them."""
    theirs = dataclasses.replace(PROGRESS, window_losses=torch.tensor([2.5, 4.125]))
    writers = (dataclasses.replace(rank, rank=number, world_size=2) for number in range(2))
    state = {
        name: tensor
        for writer, progress in zip(writers, (PROGRESS, theirs), strict=True)
        for name, tensor in progress.tensors(writer).items()
    }
    path = write(tmp_path, rank, state=state, progress=PROGRESS.to_json(), world_size=2)
    reader = dataclasses.replace(rank, rank=rank_of, world_size=world_size)
    progress = read_progress(read_manifest(path), reader, same_plan=False)
    assert progress.window_losses.tolist() == losses


def test_nothing_yet(tmp_path, rank):
    again = read_again(Progress(step=1), tmp_path, rank, same_plan=True)
    assert math.isnan(again.loss)
    assert again.window_losses.tolist() == again.step_ms.tolist() == []


def test_random_numbers_go_on(tmp_path, rank):
    def draw() -> list[float]:
        return [float(torch.rand(())), random.random(), float(np.random.random())]

    path = write(tmp_path, rank, state=PROGRESS.tensors(rank), progress=PROGRESS.to_json())
    expected = draw()
    assert draw() != expected
    read_progress(read_manifest(path), rank, same_plan=True)
    assert draw() == expected


@pytest.mark.parametrize("step", [0, 1, 3, 7, 10, 40])
def test_schedule_goes_on(step):
    schedule = Schedule(warmup_steps=3, decay_start_step=5, decay_steps=20)

    def made() -> tuple[torch.optim.Optimizer, LambdaLR]:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.3)
        return optimizer, LambdaLR(optimizer, schedule.factor)

    def rates(optimizer: torch.optim.Optimizer, scheduler: LambdaLR, number: int) -> list[float]:
        found = []
        for _ in range(number):
            found.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            scheduler.step()
        return found

    resumed, its_scheduler = made()
    set_schedule_step(its_scheduler, step)
    assert rates(resumed, its_scheduler, 4) == rates(*made(), step + 4)[step:]


def test_window_begins_with_earlier_losses(rank):
    """Their times are those of another process."""
    window = Window(3, rank, earlier=[torch.tensor(0.5), torch.tensor(0.25)])
    window.add(torch.tensor(0.75))
    closed = ClosedWindow(window)
    assert closed.mean_losses().tolist() == [0.5, 0.25, 0.75]
    assert (closed.first_step, closed.first_timed_step) == (3, 5)
    assert len(closed.step_ms()) == 1


def test_a_window_averages_over_ranks(rank, monkeypatch):
    """The other rank has a loss of 3."""

    def add_other_rank(losses: torch.Tensor, **_: object) -> Mock:
        losses += 3.0
        return Mock()

    window = Window(0, dataclasses.replace(rank, world_size=2))
    window.add(torch.tensor(1.0))
    monkeypatch.setattr(dist, "all_reduce", add_other_rank)
    assert ClosedWindow(window).mean_losses().tolist() == [2.0]
