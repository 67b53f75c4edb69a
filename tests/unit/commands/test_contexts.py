"""What plans for this machine know of it, so that changes of FBGEMM's kernels are costed."""

import dataclasses
from contextlib import nullcontext
from importlib.metadata import version

import pytest
import torch

from dlrm_sharded.commands.sharders import run_context
from dlrm_sharded.files.errors import ConfigError
from dlrm_sharded.plans.task import Topology
from tests.unit.contest.entries import TASK


def test_the_version_of_fbgemm_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", str(torch.get_num_threads()))  # so that they stay
    task = dataclasses.replace(TASK, topology=Topology(2, 10**9, compute_device="cpu"))
    context = run_context("here", task, "sgd")
    assert context.fbgemm == version("fbgemm-gpu-cpu")


@pytest.mark.parametrize(
    ("hardware", "num_ranks", "per_host", "said"),
    [
        ("h100_sxm", 64, None, "64 ranks are on one host, as none is stated, .* connects 8; set"),
        ("h100_sxm", 64, 8, None),
        ("h100_sxm", 8, None, None),
        ("gb200", 64, None, None),
        ("v100_sxm", 16, 16, None),  # as users say who have such hosts
    ],
)
def test_links_connect_no_more_gpus_than_a_host_has(
    hardware: str, num_ranks: int, per_host: int | None, said: str | None
) -> None:
    topology = Topology(num_ranks, 10**9, local_world_size=per_host, compute_device="cuda")
    task = dataclasses.replace(TASK, topology=topology)
    with nullcontext() if said is None else pytest.raises(ConfigError, match=said):
        assert run_context(hardware, task, "sgd").ranks_per_host == topology.ranks_per_host
