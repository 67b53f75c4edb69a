"""What tests of training runs share: a cost model, and a run that used it."""

import os
from pathlib import Path

import pytest
import torch

from dlrm_sharded.cost.learned import KIND
from dlrm_sharded.cost.learned_arrays import learned_features
from dlrm_sharded.files.json_files import write_json
from dlrm_sharded.files.provenance import device_name
from dlrm_sharded.hardware.artifact import read_artifact, write_artifact
from dlrm_sharded.hardware.artifact_kinds import cost_model_kind
from dlrm_sharded.testing import small_tasks
from tests.conftest import SMALL_RUN
from tests.e2e.runs import train
from tests.unit.conftest import OF_A_CPU


@pytest.fixture(scope="session")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The packaged costs of a CPU, as those of this hardware."""
    found = read_artifact(Path(OF_A_CPU), kind=cost_model_kind(KIND), features=learned_features)
    here = {
        "hardware": device_name(torch.device("cpu")),
        "fingerprint": None,
        "cores": len(os.sched_getaffinity(0)),
        "optimizer": "rowwise_adagrad",
    }
    folder = tmp_path_factory.mktemp("artifacts")
    return write_artifact(folder, "of_here", found.arrays, found.meta | here)


@pytest.fixture(scope="session")
def run_dir(tmp_path_factory: pytest.TempPathFactory, artifact: Path) -> Path:
    """One finished run, to be read."""
    folder = tmp_path_factory.mktemp("runs") / "search"
    done = train(folder, *SMALL_RUN, "seed=3", f"cost_model.artifact={artifact}")
    assert "embedding cost" in done.stderr
    assert done.stderr.count("predicted ") == 3, "after planning, after measuring, summary"
    assert "above the lower bound" in done.stderr
    assert "the cost model is of" not in done.stderr
    assert "samples/s" in done.stderr
    return folder


@pytest.fixture
def task_json(tmp_path: Path) -> Path:
    """A task for three CPUs, alone in a folder."""
    write_json(tmp_path / "task.json", small_tasks()["w3-mixed"].to_json())
    return tmp_path / "task.json"
