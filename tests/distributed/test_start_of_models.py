"""A TorchRec model is planned with prices of its hardware, which its ranks measure first."""

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from dlrm_sharded import ShardedPlanner, plan_model
from dlrm_sharded.calibration.sample_store import conditions_of, sample_store
from dlrm_sharded.drop_in.run_costs import context_of_topology
from dlrm_sharded.files.errors import ConfigError
from dlrm_sharded.hardware import probing
from dlrm_sharded.model.fused_optimizers import fuse
from dlrm_sharded.ranks.distributed import Rank
from tests.first_runs import count_measurements
from tests.preloaded.ranks import gathered, run_ranks
from tests.unit.calibration.cases import ELSEWHERE, on_other_hardware
from tests.unit.cost.hardware import measured_plans
from tests.unit.drop_in.made_up import bags
from tests.unit.hardware.test_torch_defaults import set_everything, switches

pytestmark = pytest.mark.slow


def plan_twice(rank: Rank, cache: str, optimizer: str | None) -> dict[str, Any]:
    """Plan two models on hardware that nobody has prices of; measurements count as seconds."""
    os.environ |= {"ONEDNN_MAX_CPU_ISA": "DEFAULT", "DLRM_SHARDED_CACHE": cache}
    os.environ["DLRM_SHARDED_JOURNAL"] = "auto"
    measured = count_measurements()
    numbers, standings = [], []
    for _ in range(2):
        model = bags()
        if optimizer is not None:
            fuse(optimizer, model.parameters(), 0.1)
        plan, report = plan_model(model, batch_size=64, calibrate=14, patience=1)
        numbers.append(len(measured))
        standings.append(report.details.standing)
    placed = {name: list(found.ranks) for name, found in plan.plan[""].items()}
    return {"standings": standings, "everywhere": gathered(rank, (numbers, placed))}


def test_ranks_measure_once_for_the_prices_of_all_plans(tmp_path: Path) -> None:
    seen = run_ranks(plan_twice, 2, str(tmp_path), "rowwise_adagrad")
    (numbers, placed), other = seen["everywhere"]
    assert other == (numbers, placed)
    assert numbers[0] >= 8
    assert numbers[1] == numbers[0], "the second one found what the first one kept"
    assert [standing.kind for standing in seen["standings"]] == ["measured"] * 2


def test_nothing_is_measured_without_a_fused_optimizer(tmp_path: Path) -> None:
    seen = run_ranks(plan_twice, 2, str(tmp_path), None)
    assert [numbers for numbers, _ in seen["everywhere"]] == [[0, 0]] * 2
    assert [standing.kind for standing in seen["standings"]] == ["prior"] * 2


def plan_after_setting_everything(rank: Rank, cache: str) -> list[Any]:
    """Plan with each kind of prices; the switches that have changed, and those of the probe."""
    os.environ |= {"ONEDNN_MAX_CPU_ISA": "DEFAULT", "DLRM_SHARDED_CACHE": cache}
    os.environ["DLRM_SHARDED_JOURNAL"] = f"{cache}/journal"
    count_measurements()
    set_everything()
    seen, standings, fastest_s = [], [], probing._fastest_s

    def probed(*arguments: Any, **options: Any) -> list[float]:
        seen.append(
            {key: switches()[key] for key in ("fp32 products", "new tensors", "deterministic")}
        )
        return fastest_s(*arguments, **options)

    probing._fastest_s = probed
    changed = {}
    for start in ("prior", "journal", "measured"):
        model = bags()
        fuse("rowwise_adagrad", model.parameters(), 0.1)
        before = switches()
        options = {"calibrate": 14} if start == "measured" else {}
        _, report = plan_model(model, batch_size=64, patience=1, **options)
        after = switches()
        changed[start] = [key for key in before if before[key] != after[key]]
        standings.append(report.details.standing)
        if start == "prior" and rank.is_zero:
            context = context_of_topology(report.task.topology, "rowwise_adagrad")
            for run in on_other_hardware(measured_plans(12, 0, seed=5), ELSEWHERE):
                store = sample_store(context, f"{cache}/journal")
                assert store.append(conditions_of(context), dataclasses.replace(run, kind="run"))
    return gathered(rank, (changed, standings, seen))


def test_a_process_keeps_what_its_user_has_set(tmp_path: Path) -> None:
    """With packaged prices, those of a journal and measured ones, on all ranks."""
    first, second = run_ranks(plan_after_setting_everything, 2, str(tmp_path))
    for changed, *_ in (first, second):
        assert changed == {"prior": [], "journal": [], "measured": []}
    _, (prior, journal, measured), [probe, *_] = first
    assert (prior.kind, measured.kind) == ("prior", "measured")
    assert journal.num_runs > 0
    assert probe["fp32 products"][1] == probe["fp32 products"][-1] == "ieee"
    assert probe["new tensors"][0] == torch.float32
    assert probe["deterministic"] == (False, False)


@pytest.mark.parametrize("seconds", [0, -1, "20", 10_000])
def test_seconds_are_checked(seconds: Any) -> None:
    with pytest.raises(ConfigError, match=r"calibrate is .*, must be a number > 0, <= 3600"):
        ShardedPlanner(calibrate=seconds)
