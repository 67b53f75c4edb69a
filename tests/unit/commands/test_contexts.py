"""What plans for this machine know of it, so that changes of FBGEMM's kernels are priced."""

from importlib.metadata import version

import pytest
import torch

from dlrm_sharded.commands.advise_config import question_of
from dlrm_sharded.commands.sharders import context_here
from dlrm_sharded.commands.simulated_cluster import build_cluster
from dlrm_sharded.hardware.context import RunContext
from dlrm_sharded.plans.task import ShardingTask, Topology
from tests.unit.commands.conftest import composed_config

ON_CPUS = Topology(2, 10**9, compute_device="cpu")


def of_plan() -> RunContext:
    return context_here(ON_CPUS, "sgd")


def of_advice() -> RunContext:
    data = ["data=synthetic", "data.max_rows=100", "hardware=cpu", "ranks=1", "sharder=dim"]
    question, _ = question_of(composed_config("advise", *data), None)
    case = question.cases[0]
    assert isinstance(case.task, ShardingTask)
    return question.context_of(case, case.task)


def of_simulation() -> RunContext:
    data = ["data=synthetic", "data.max_rows=100", "topology.world_size=2", "out=out"]
    return build_cluster(composed_config("simulate", *data)).context


@pytest.mark.parametrize("context_of", [of_plan, of_advice, of_simulation])
def test_the_version_of_fbgemm_here(context_of, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", str(torch.get_num_threads()))  # so that they stay
    assert context_of().fbgemm == version("fbgemm-gpu-cpu")


def test_advice_has_the_hardware_of_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", str(torch.get_num_threads()))
    advised, planned = of_advice().hardware, of_plan().hardware
    assert advised is not None
    assert planned is not None
    assert (advised.name, advised.fingerprint) == (planned.name, planned.fingerprint)
