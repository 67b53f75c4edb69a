"""Two ranks measure a first start together, and too little of it is none."""

from typing import Any

import pytest

from dlrm_sharded.calibration import start_measurement
from dlrm_sharded.hardware.context import RunContext
from dlrm_sharded.hardware.detect import detect_hardware
from dlrm_sharded.plans.plan_cost import STAGES
from dlrm_sharded.plans.tables import Table
from dlrm_sharded.ranks.distributed import Rank
from tests.first_starts import count_measurements
from tests.preloaded.ranks import gathered, run_ranks

pytestmark = pytest.mark.slow

TABLES = (Table("a", 5000, 16, 3.0), Table("b", 400, 8, 5.5), Table("c", 70_000, 64, 2.0))


def measured_by(rank: Rank, optimizer: str, budget_s: float) -> dict[str, Any]:
    """Measure a few plans, and say how many."""
    measured = count_measurements()
    context = RunContext(
        rank.device.type, detect_hardware(rank), optimizer, rank.local_world_size, None
    )
    start = start_measurement.measure_first_start(rank, context, TABLES, 64, budget_s=budget_s)
    return {"starts": gathered(rank, start), "num_measured": gathered(rank, len(measured))}


@pytest.mark.parametrize("optimizer", ["rowwise_adagrad", "sgd"])
def test_two_ranks_measure_together(optimizer: str) -> None:
    seen = run_ranks(measured_by, 2, optimizer, 14.0)
    start, none = seen["starts"]
    assert none is None, "rank 0 fits"
    assert len(set(seen["num_measured"])) == 1
    assert 8 <= seen["num_measured"][0] <= 14
    # ranks that compute together exchange, too, so what tells most may be of one kind
    assert {"computation", "communication"} >= {sample.kind for sample in start.samples}
    exchanging = [sample for sample in start.samples if sample.world_size == 2]
    assert exchanging
    for sample in exchanging:
        for stages in sample.cost.per_rank:
            assert all(stages.stage_ms(stage) > 0 for stage in STAGES)


def test_too_few_measurements_change_nothing() -> None:
    """Such as those of a machine on which the time is over at once."""
    assert run_ranks(measured_by, 2, "sgd", 2.0)["starts"] == [None, None]
