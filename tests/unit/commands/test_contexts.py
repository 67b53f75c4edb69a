"""What plans for this machine know of it, so that changes of FBGEMM's kernels are priced."""

from importlib.metadata import version

import pytest
import torch

from dlrm_sharded.commands.sharders import context_here
from dlrm_sharded.plans.task import Topology


def test_the_version_of_fbgemm_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", str(torch.get_num_threads()))  # so that they stay
    context = context_here(Topology(2, 10**9, compute_device="cpu"), "sgd")
    assert context.fbgemm == version("fbgemm-gpu-cpu")
