"""A training changes how its steps run after the first ones, and trains as it would have."""

from typing import Any
from unittest.mock import patch

import pytest
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dlrm_sharded.model import dlrm as dlrm_module
from dlrm_sharded.model.dense_graph import DenseGraph
from dlrm_sharded.ranks.distributed import Rank
from dlrm_sharded.training import step_choice, steps
from dlrm_sharded.training.step_choice import StepTimes, StepTrial
from dlrm_sharded.training.trainer_config import TrainerConfig
from tests.distributed.small_model import make_sharded, run_trainer
from tests.preloaded.ranks import run_ranks

NUM_STEPS, WARMUP_STEPS, TRIAL_STEPS = 11, 6, 4
BOUNDS = {"host": StepTimes(8.0, 0.5, graph_fits=True), "GPU": StepTimes(8.0, 7.0, graph_fits=True)}


def train(rank: Rank, bound: str | None, num_steps: int = NUM_STEPS) -> dict[str, Any]:
    """Losses of all steps, and what trains at the end; on a CPU that is tried as a GPU is."""
    found: dict[str, Any] = {"losses": []}
    options: dict[str, Any] = {}
    devices = ("cuda",)
    if bound is not None:
        options, devices = {"compile_mode": None, "dense_graph": None}, ("cuda", "cpu")

    def log(tag: str, value: float, step: int) -> None:
        if tag == "train/loss":
            found["losses"].append(value)

    def compile_module(module: nn.Module, mode: str) -> None:
        module._compiled_call_impl = module.forward
        found["mode"] = mode

    config = TrainerConfig(
        num_steps=num_steps,
        log_every_steps=1,
        num_warmup_steps=WARMUP_STEPS,
        pipeline="base" if bound is None else None,
    )
    with (
        patch.object(dlrm_module, "TRIED_DEVICES", devices),
        patch.object(steps, "TRIED_DEVICES", devices),
        patch.object(steps, "TRIAL_STEPS", TRIAL_STEPS),
        patch.multiple(step_choice, TRIAL_STEPS=TRIAL_STEPS, UNTIMED_STEPS=1),
        patch.object(StepTrial, "times", lambda self: BOUNDS[str(bound)]),
        patch.object(nn.Module, "compile", compile_module),
    ):
        sharded, optimizer = make_sharded(rank, "rows_and_columns", "sgd", **options)
        run_trainer(rank, sharded, optimizer, config, log_scalar=log)
    modules = list(sharded.modules())
    graphs = [module.records for module in modules if isinstance(module, DenseGraph)]
    found["graphs"] = graphs
    found["has_ddp"] = any(isinstance(module, DistributedDataParallel) for module in modules)
    return found


@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_losses_stay_where_steps_change(num_ranks):
    expected = run_ranks(train, num_ranks, None)["losses"]
    assert len(expected) == NUM_STEPS
    by_host = run_ranks(train, num_ranks, "host")
    assert by_host.pop("losses") == pytest.approx(expected, rel=1e-6)
    assert by_host == {"graphs": [True], "has_ddp": False}
    by_gpu = run_ranks(train, num_ranks, "GPU")
    assert by_gpu.pop("losses") == pytest.approx(expected, rel=1e-6)
    assert by_gpu == {"graphs": [], "has_ddp": num_ranks > 1, "mode": "default"}


def test_a_training_that_ends_in_its_warm_up_tries_nothing():
    found = run_ranks(train, 1, "host", WARMUP_STEPS)
    assert len(found.pop("losses")) == WARMUP_STEPS
    assert found == {"graphs": [], "has_ddp": False}
