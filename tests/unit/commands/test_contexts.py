"""What plans for this machine know of it, so that changes of FBGEMM's kernels are priced."""

from importlib.metadata import version

import pytest
import torch

from dlrm_sharded.advice.machines import TableMemory, cpu_machine
from dlrm_sharded.commands.sharders import context_here
from dlrm_sharded.commands.simulated_cluster import build_cluster
from dlrm_sharded.hardware.context import RunContext
from dlrm_sharded.hardware.hardware import Hardware
from dlrm_sharded.plans.task import Topology
from tests.unit.commands.conftest import composed_config

ON_CPUS = Topology(2, 10**9, compute_device="cpu")


def of_plan() -> RunContext:
    return context_here(ON_CPUS, "sgd")


def of_advice() -> RunContext:
    memory = TableMemory(None, 0.7)
    return cpu_machine("here", memory, Hardware("a CPU"), optimizer="sgd").context(ON_CPUS)


def of_simulation() -> RunContext:
    data = ["data=synthetic", "data.max_rows=100", "topology.world_size=2", "out=out"]
    return build_cluster(composed_config("simulate", *data)).context


@pytest.mark.parametrize("context_of", [of_plan, of_advice, of_simulation])
def test_the_version_of_fbgemm_here(context_of, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", str(torch.get_num_threads()))  # so that they stay
    assert context_of().fbgemm == version("fbgemm-gpu-cpu")
