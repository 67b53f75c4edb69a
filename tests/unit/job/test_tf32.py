"""How fp32 matrices are multiplied on GPUs is set before anything is measured."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from dlrm_sharded.hardware import probing
from dlrm_sharded.job import rounds
from dlrm_sharded.job import run as run_module


class BegunError(Exception):
    """The job has come to what it does first."""


@pytest.mark.parametrize("stated", [True, False], ids=["rounded", "exact"])
@pytest.mark.parametrize("kind", ["run", "round"])
def test_a_job_sets_what_its_config_says_at_first(monkeypatch, tf32, kind, stated):
    """Several runs of one process may differ."""

    def begin(*args: Any) -> Any:
        raise BegunError(tf32())

    tf32(not stated)
    settings: Any = SimpleNamespace(trainer=SimpleNamespace(tf32=stated))
    module, start = {
        "run": (run_module, lambda: run_module.run(settings, MagicMock(), Path())),
        "round": (
            rounds,
            lambda: rounds.measure_round(settings, MagicMock(), Path(), MagicMock()),
        ),
    }[kind]
    monkeypatch.setattr(module, "owned_folder", begin)
    with pytest.raises(BegunError, match=f"^{stated}$"):
        start()


@pytest.mark.parametrize("before", [True, False])
def test_probes_of_all_trainings_multiply_alike(monkeypatch, tf32, before):
    tf32(before)
    seen = []

    def fastest_s(figures: Any, device: Any, *, num_rounds: int) -> list[float]:
        seen.append(torch.backends.cuda.matmul.fp32_precision)
        return [1.0] * len(figures)

    monkeypatch.setattr(probing, "_fastest_s", fastest_s)
    monkeypatch.setattr(probing, "ROWS", {"cpu": 1024})
    probing.measure_probe(torch.device("cpu"))
    assert (seen, tf32()) == (["ieee"], before)
