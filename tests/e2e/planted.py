"""Datasets and models with a planted cause of slow steps, which traces must name."""

import os
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed.embedding_lookup import GroupedPooledEmbeddingsLookup

from dlrm_sharded.calibration import start_measurement
from dlrm_sharded.datasets.base import Batch
from dlrm_sharded.datasets.synthetic import SyntheticDataset
from dlrm_sharded.model.dlrm import Dlrm, dlrm
from tests.first_starts import count_measurements

SLOW_RANK = 1


def sleep_on_slow_rank(sleep_s: float) -> None:
    if os.environ["RANK"] == str(SLOW_RANK):
        time.sleep(sleep_s)


class SlowReader(SyntheticDataset):
    """Reads each batch slowly on one rank."""

    def __init__(self, *arguments: Any, sleep_s: float, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._sleep_s = sleep_s

    def batch(self, split: Any, index: int, *, rank: int, world_size: int) -> Batch:
        sleep_on_slow_rank(self._sleep_s)
        return super().batch(split, index, rank=rank, world_size=world_size)


class SlowLookups(SyntheticDataset):
    """Lets the lookups of one rank take longer."""

    def __init__(self, *arguments: Any, sleep_s: float, **options: Any) -> None:
        super().__init__(*arguments, **options)
        look_up = GroupedPooledEmbeddingsLookup.forward

        def slow(self: Any, features: Any) -> Tensor:
            sleep_on_slow_rank(sleep_s)
            return look_up(self, features)

        GroupedPooledEmbeddingsLookup.forward = slow


class SlowLink(SyntheticDataset):
    """Delays each all-to-all in training after all ranks have come to it."""

    def __init__(self, *arguments: Any, sleep_s: float, is_fast_for: int, **options: Any) -> None:
        super().__init__(*arguments, **options)
        exchange, num_calls = dist.all_to_all_single, 0

        def slow(*arguments: Any, **options: Any) -> Any:
            nonlocal num_calls
            work = exchange(*arguments, **options)
            if work is None:
                return None  # the probe of the hardware, which is made once per machine
            num_calls += 1
            if num_calls > is_fast_for:  # it was fast when it was measured
                work.wait()
                time.sleep(sleep_s)
            return work

        dist.all_to_all_single = slow


class StartBeside(SyntheticDataset):
    """Lets a first start find this other work beside it, or none, whatever the machine does.

    Its seconds are measurements.
    """

    def __init__(self, *arguments: Any, other_work: str | None, **options: Any) -> None:
        super().__init__(*arguments, **options)
        count_measurements()
        start_measurement.disturbance = lambda *found, **figures: other_work


class Waste(nn.Module):
    """Squares a large matrix, and returns its input."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("matrix", torch.full((size, size), 1e-3), persistent=False)

    def forward(self, features: Tensor) -> Tensor:
        return features + 0 * torch.mm(self.matrix, self.matrix)[0, 0]


class SlowLayer(nn.Module):
    """Sleeps on one rank."""

    def __init__(self, sleep_s: float) -> None:
        super().__init__()
        self._sleep_s = sleep_s

    def forward(self, features: Tensor) -> Tensor:
        sleep_on_slow_rank(self._sleep_s)
        return features


def wasteful(*arguments: Any, size: int, **options: Any) -> Dlrm:
    """A DLRM whose layers do what nobody needs."""
    return _with_layer(dlrm(*arguments, **options), Waste(size).to(options["device"]))


def slow_on_one_rank(*arguments: Any, sleep_s: float, **options: Any) -> Dlrm:
    return _with_layer(dlrm(*arguments, **options), SlowLayer(sleep_s))


def _with_layer(model: Dlrm, layer: nn.Module) -> Dlrm:
    model.over_arch = nn.Sequential(layer, model.over_arch)
    return model
