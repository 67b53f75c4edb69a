"""What tests of training runs share: a cost model, and a run that used it."""

import math
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from dlrm_sharded.cost.communication import (
    EXCHANGE_TERMS,
    EXCHANGES,
    LINKS,
    REDUCE_TERMS,
    CommunicationModel,
)
from dlrm_sharded.cost.compute import ComputeModel, PriceNet
from dlrm_sharded.cost.features import CPU_WORK, EXTENT, PROFILE
from dlrm_sharded.cost.learned import KIND
from dlrm_sharded.cost.learned_arrays import learned_features, to_arrays
from dlrm_sharded.files.json_files import write_json
from dlrm_sharded.files.provenance import device_name
from dlrm_sharded.hardware.artifact import write_artifact
from dlrm_sharded.testing import small_tasks
from tests.conftest import SMALL_RUN
from tests.e2e.runs import train


@pytest.fixture(scope="session")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cost model of this hardware, made by hand: work has one price, bytes go at 1 GB/s."""
    num_terms = len(CPU_WORK.terms)

    def net(price_ms: float) -> PriceNet:
        return PriceNet(
            weights=(np.zeros((len(PROFILE), 1)), np.zeros((1, num_terms))),
            biases=(np.zeros(1), np.full(num_terms, math.log(price_ms))),
            cache_gain=np.zeros((num_terms, 1)),
            cache_mb=np.zeros(1),
            cache_slope=np.ones(1),
            launch_ms=0.125,
            next_launch_ms=0.0,
        )

    anything = np.full(len(PROFILE), 100.0)
    compute = ComputeModel(
        0 * anything, np.ones_like(anything), -anything, anything, net(0.001), net(0.002)
    )
    exchange = np.zeros((len(EXCHANGES), len(EXCHANGE_TERMS)))
    exchange[:, EXCHANGE_TERMS.index("max_both_links")] = 1.0
    reduce = np.zeros((len(EXCHANGES), len(REDUCE_TERMS)))
    meta = {
        "kind": KIND,
        "features": learned_features("cpu"),
        "hardware": device_name(torch.device("cpu")),
        "device": "cpu",
        "cores": len(os.sched_getaffinity(0)),
        "optimizer": "rowwise_adagrad",
        "ranges": dict.fromkeys(EXTENT, (0.0, 1e12)),
        "measured_links": LINKS,
    }
    arrays = to_arrays(compute, CommunicationModel(exchange, reduce))
    return write_artifact(tmp_path_factory.mktemp("artifacts"), "by_hand", arrays, meta)


@pytest.fixture(scope="session")
def run_dir(tmp_path_factory: pytest.TempPathFactory, artifact: Path) -> Path:
    """One finished run, to be read."""
    folder = tmp_path_factory.mktemp("runs") / "search"
    done = train(folder, *SMALL_RUN, "seed=3", f"cost_model.artifact={artifact}")
    assert "embedding cost" in done.stderr
    assert done.stderr.count("predicted ") == 3, "after planning, after measuring, summary"
    assert "above the best possible" in done.stderr
    assert "the cost model is of" not in done.stderr
    assert "samples/s" in done.stderr
    return folder


@pytest.fixture
def task_json(tmp_path: Path) -> Path:
    """A task for three CPUs, alone in a folder."""
    write_json(tmp_path / "task.json", small_tasks()["w3-mixed"].to_json())
    return tmp_path / "task.json"
