"""What a trainer remembers across an interruption."""

import math
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR

from dlrm_sharded.checkpoint.manifest import read_manifest
from dlrm_sharded.checkpoint.saver import Saver
from dlrm_sharded.model.optimizers import Schedule
from dlrm_sharded.ranks.distributed import Rank
from dlrm_sharded.training.metrics import Evaluation
from dlrm_sharded.training.pipeline import set_schedule_step
from dlrm_sharded.training.progress import Progress, read_progress
from dlrm_sharded.training.window import ClosedWindow, Window
from tests.unit.checkpoint.cases import run_state

PROGRESS = Progress(
    step=5,
    loss=0.25,
    evaluation=Evaluation(auroc=0.75, normalized_entropy=0.5, num_samples=8),
    evaluated_step=4,
    steady_s=2.5,
    window_losses=torch.tensor([0.5, 0.125]),
    step_ms=torch.tensor([8.0, 9.0]),
)


def read_again(progress: Progress, folder: Path, rank: Rank, *, same_plan: bool) -> Progress:
    saver = Saver(folder, keep=1, background=False, rank=rank)
    saver.save(progress.tensors(rank), run_state(progress.step, progress=progress.to_json()))
    saver.close()
    path = folder / "checkpoints" / f"step-{progress.step:010}"
    return read_progress(read_manifest(path), rank, same_plan=same_plan)


def test_is_the_same_again(tmp_path: Path, rank: Rank) -> None:
    again = read_again(PROGRESS, tmp_path, rank, same_plan=True)
    assert again.to_json() == PROGRESS.to_json()
    assert again.step == 5
    assert again.window_losses.tolist() == [0.5, 0.125]
    assert again.step_ms.tolist() == [8.0, 9.0]


def test_times_belong_to_a_plan(tmp_path: Path, rank: Rank) -> None:
    again = read_again(PROGRESS, tmp_path, rank, same_plan=False)
    assert again.step_ms.tolist() == []
    assert again.window_losses.tolist() == [0.5, 0.125]


def test_nothing_yet(tmp_path: Path, rank: Rank) -> None:
    again = read_again(Progress(step=1), tmp_path, rank, same_plan=True)
    assert math.isnan(again.loss)
    assert again.window_losses.tolist() == again.step_ms.tolist() == []


def test_random_numbers_go_on(tmp_path: Path, rank: Rank) -> None:
    def draw() -> list[float]:
        return [float(torch.rand(())), random.random(), float(np.random.random())]

    saver = Saver(tmp_path, keep=1, background=False, rank=rank)
    saver.save(PROGRESS.tensors(rank), run_state(5, progress=PROGRESS.to_json()))
    saver.close()
    expected = draw()
    assert draw() != expected
    read_progress(read_manifest(tmp_path / "checkpoints" / "step-0000000005"), rank, same_plan=True)
    assert draw() == expected


@pytest.mark.parametrize("step", [0, 1, 3, 7, 10, 40])
def test_schedule_goes_on(step: int) -> None:
    schedule = Schedule(warmup_steps=3, decay_start_step=5, decay_steps=20)

    def made() -> tuple[torch.optim.Optimizer, LambdaLR]:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.3)
        return optimizer, LambdaLR(optimizer, schedule.factor)

    optimizer, scheduler = made()
    for _ in range(step):
        optimizer.step()
        scheduler.step()
    resumed, resumed_scheduler = made()
    set_schedule_step(resumed_scheduler, step)
    rates = []
    for one, of_it in ((optimizer, scheduler), (resumed, resumed_scheduler)):
        seen = [one.param_groups[0]["lr"]]
        for _ in range(3):
            one.step()
            of_it.step()
            seen.append(one.param_groups[0]["lr"])
        rates.append(seen)
    assert rates[0] == rates[1]


def test_window_begins_with_earlier_losses(rank: Rank) -> None:
    """Their times are those of another process."""
    window = Window(3, rank, earlier=[torch.tensor(0.5), torch.tensor(0.25)])
    window.add(torch.tensor(0.75))
    closed = ClosedWindow(window)
    assert closed.mean_losses().tolist() == [0.5, 0.25, 0.75]
    assert (closed.first_step, closed.first_timed_step) == (3, 5)
    assert len(closed.step_ms()) == 1
