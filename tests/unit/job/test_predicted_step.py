"""A run takes the host's time of a step from its measurements, if it computes on GPUs."""

import dataclasses

import pytest
import torch

from dlrm_sharded.job.predicted_step import host_time_of
from dlrm_sharded.ranks.distributed import Rank
from dlrm_sharded.step.host_time import LOOP_MS
from dlrm_sharded.step.prediction import DensePart
from tests.unit.runs.test_result import MEASURED
from tests.unit.step.made_up import dense_times

DENSE = DensePart(
    tuple(dense_times(optimizer_ms=1.0, launch_ms=ms) for ms in (2.0, 2.5)), all_reduce_ms=1.0
)


@pytest.mark.parametrize(("device", "host_ms"), [("cuda", 2.5 + 1.5 + LOOP_MS), ("cpu", None)])
def test_the_slowest_host_counts(device, host_ms):
    measured = dataclasses.replace(MEASURED, host_ms=1.5)
    found = host_time_of(measured, DENSE, Rank(0, 2, 0, 2, torch.device(device)))
    assert (found and found.ms) == (host_ms and pytest.approx(host_ms))
    assert found is None or found.source == "measured"
