"""What ranks do on GPUs: they take theirs, know its memory, watch NCCL, and time by events."""

import os
from unittest.mock import Mock

import pytest
import torch

from dlrm_sharded.files.errors import ConfigError
from dlrm_sharded.files.provenance import device_name
from dlrm_sharded.ranks import distributed, flight_recorder
from dlrm_sharded.ranks.distributed import Rank, detect_topology, used_and_available_bytes
from dlrm_sharded.ranks.step_watch import StepWatch
from dlrm_sharded.ranks.stopwatch import Stopwatch
from tests.cuda_stand_ins import FREE_BYTES, GPU, NAME, TOTAL_BYTES, Gpu

RANK = Rank(0, 1, 0, 1, GPU)


def test_a_rank_takes_its_own_gpu(gpu: Gpu) -> None:
    distributed._prepare_device(RANK)
    assert gpu.calls == [("set_device", GPU)]


def test_more_ranks_than_gpus(gpu: Gpu) -> None:
    second = Rank(3, 4, 1, 2, torch.device("cuda", 1))
    with pytest.raises(ConfigError, match="rank 3 is number 1 on its host and finds 1 GPUs"):
        distributed._prepare_device(second)
    assert gpu.calls == []


@pytest.mark.usefixtures("no_torchrun", "gpu")
def test_memory_is_that_of_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "device_type", lambda: "cuda")
    topology = detect_topology(memory_fraction=0.5)
    assert topology.memory_bytes == FREE_BYTES // 2
    assert topology.compute_device == "cuda"
    assert used_and_available_bytes(RANK) == (TOTAL_BYTES - FREE_BYTES, FREE_BYTES)
    assert device_name(GPU) == NAME


def test_nccl_is_watched_by_its_flight_recorder(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Single collectives have no watch, as NCCL's own watchdog ends the process."""
    for variable in (*flight_recorder.SETTINGS, flight_recorder.FILE_VARIABLE):
        monkeypatch.setenv(variable, "")  # so that it is unset after the test
        monkeypatch.delenv(variable)
    monkeypatch.setattr(flight_recorder, "FOLDER", tmp_path)
    monkeypatch.setenv("MASTER_PORT", "29500")
    made = Mock(wraps=StepWatch)
    monkeypatch.setattr(distributed, "StepWatch", made)
    assert len(distributed._watches(Mock(), RANK, 600)) == 1
    told = made.call_args.kwargs
    assert told["pending"] is flight_recorder.pending_collective
    assert "read them by: torchfrtrace" in told["end_text"]
    assert os.environ.keys() >= {*flight_recorder.SETTINGS}


def test_a_stopwatch_records_events(gpu: Gpu) -> None:
    watch = Stopwatch(GPU)
    watch.mark()
    for work_ms in (2.0, 3.0):
        gpu.queue(work_ms)
        watch.mark()
    after = watch.restarted()
    gpu.queue(0.5)
    after.mark()
    assert gpu.calls == ["synchronize", "event", "event", "event", "event"]  # no wait yet
    assert watch.intervals_ms() == [2.0, 3.0]
    assert after.intervals_ms() == [0.5]
