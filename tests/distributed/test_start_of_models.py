"""A TorchRec model is planned with prices of its hardware, which its ranks measure first."""

import os
from pathlib import Path
from typing import Any

import pytest

from dlrm_sharded import ShardedPlanner, plan_model
from dlrm_sharded.calibration import start_measurement
from dlrm_sharded.files.errors import ConfigError
from dlrm_sharded.model.fused_optimizers import fuse
from dlrm_sharded.ranks.distributed import Rank
from tests.first_starts import count_measurements
from tests.preloaded.ranks import gathered, run_ranks
from tests.unit.drop_in.made_up import bags

pytestmark = pytest.mark.slow


def plan_twice(rank: Rank, cache: str, optimizer: str | None) -> dict[str, Any]:
    """Plan two models on hardware that nobody has prices of; measurements count as seconds."""
    os.environ |= {"ONEDNN_MAX_CPU_ISA": "DEFAULT", "DLRM_SHARDED_CACHE": cache}
    measured = count_measurements()
    start_measurement.disturbance = lambda *arguments, **options: None
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


@pytest.mark.parametrize("seconds", [0, -1, "20", 10_000])
def test_seconds_are_checked(seconds: Any) -> None:
    with pytest.raises(ConfigError, match=r"calibrate is .*, must be a number > 0, <= 3600"):
        ShardedPlanner(calibrate=seconds)
