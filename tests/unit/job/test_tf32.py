"""How fp32 matrices are multiplied on GPUs is set before anything is measured."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from dlrm_sharded.job import measure_run
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
            measure_run,
            lambda: measure_run.measure_round(settings, MagicMock(), Path(), 0, 0, 0, num_steps=1),
        ),
    }[kind]
    monkeypatch.setattr(module, "owned_folder", begin)
    with pytest.raises(BegunError, match=f"^{stated}$"):
        start()
