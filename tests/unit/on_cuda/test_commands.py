"""Commands know the GPUs of a machine, and say what they take of them."""

from typing import Any

import pytest

from dlrm_sharded.commands import check_install, collect_costs, sharders
from dlrm_sharded.cost.learned import shipped_cost_model, shipped_prior
from dlrm_sharded.files.errors import ConfigError
from dlrm_sharded.hardware.context import RunContext
from dlrm_sharded.hardware.hardware import Hardware
from tests.cuda_stand_ins import NAME
from tests.unit.made_up import mlperf_task


@pytest.mark.usefixtures("gpu")
def test_an_installation_names_its_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_install, "device_type", lambda: "cuda")
    monkeypatch.setattr(check_install, "_check_fbgemm", lambda device, packages: None)
    monkeypatch.setattr(check_install, "driver_version", lambda: "580.65.06")
    text = check_install.installation()
    assert text.startswith(f"computes on 1 x {NAME}, driver 580.65.06, CUDA ")


def test_a_collection_has_a_rank_for_each_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collect_costs, "device_type", lambda: "cuda")
    monkeypatch.setattr(collect_costs, "visible_gpus", lambda: ["a", "b", "c"])
    assert collect_costs.default_num_ranks() == 3


def test_a_task_for_gpus_on_a_machine_without_any(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharders, "device_type", lambda: "cpu")
    with pytest.raises(ConfigError, match="the task is for GPUs, and this machine has none"):
        sharders.context_here(mlperf_task(8, 80).topology, None)


@pytest.mark.parametrize("model_of", [shipped_cost_model, shipped_prior])
def test_a_gpu_that_nobody_calibrated_has_its_prior(model_of: Any) -> None:
    model = model_of(RunContext("cuda", Hardware(NAME)))
    assert (model.device, model.standing.kind) == ("cuda", "prior")
