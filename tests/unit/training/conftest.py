"""The loop of a trainer, with events in the place of a pipeline."""

from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn
from torchrec.datasets.utils import Batch

from dlrm_sharded.datasets.base import BatchStream
from dlrm_sharded.datasets.synthetic import SyntheticDataset
from dlrm_sharded.plans.tables import Table
from dlrm_sharded.ranks.distributed import Rank
from dlrm_sharded.training import steps as steps_module
from dlrm_sharded.training.checkpoints import Checkpoints
from dlrm_sharded.training.progress import Progress
from dlrm_sharded.training.trainer import Trainer, TrainerConfig
from dlrm_sharded.training.training_result import TrainingResult

BATCH_SIZE = 4


class Events:
    """Stands for a pipeline: a step's loss is its number. Notes steps and logs in their order."""

    def __init__(self, step: Callable[[int], float] = float) -> None:
        self._step = step
        self.seen: list[Any] = []
        self.speeds: dict[str, list[float]] = {"train/step_ms": [], "train/samples_per_s": []}

    def progress(self, batches: Iterator[Batch]) -> tuple[Tensor, None, None]:
        next(batches)
        number = 1 + sum(isinstance(event, int) for event in self.seen)
        self.seen.append(number)
        return torch.tensor(self._step(number)), None, None

    def log(self, tag: str, value: float, step: int) -> None:
        if tag == "train/loss":
            self.seen.append((step, value))
        if tag in self.speeds:
            self.speeds[tag].append(value)


Train = Callable[..., TrainingResult]


@pytest.fixture
def train(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> Train:
    """Trains with events in the place of a pipeline."""

    def run(
        events: Events,
        *,
        checkpoints: Checkpoints | None = None,
        start: Progress | None = None,
        num_val_batches: int = 0,
        kind: type[SyntheticDataset] = SyntheticDataset,
        bounds: str = "warn",
        **config: Any,
    ) -> TrainingResult:
        dataset = kind(
            (Table("t", 10, 4, 1.0),),
            batch_size=BATCH_SIZE,
            num_train_batches=3,
            num_val_batches=num_val_batches,
        )
        monkeypatch.setattr(steps_module, "CLASSES", {"base": lambda *args: events})
        return Trainer(
            nn.Linear(1, 1),
            optimizer=None,
            lr_scheduler=Mock(),
            train_stream=BatchStream(dataset, "train", bounds=bounds),
            eval_stream=BatchStream(dataset, "val"),
            config=TrainerConfig(**config),
            batch_size=BATCH_SIZE,
            rank=rank,
            log_scalar=events.log,
            checkpoints=checkpoints,
            start=start or Progress(),
        ).run()

    return run
