"""Two ranks collect together in a first run, and too few plans are none."""

from pathlib import Path
from typing import Any

import pytest

from dlrm_sharded.calibration.hardware_costs import samples_of
from dlrm_sharded.hardware.detect import context_of_job
from dlrm_sharded.job import first_run
from dlrm_sharded.plans.plan_cost import STAGES
from dlrm_sharded.plans.tables import Table
from dlrm_sharded.plans.task import ShardingTask, Topology
from dlrm_sharded.ranks.distributed import Rank
from tests.first_runs import count_measurements
from tests.preloaded.ranks import gathered, run_ranks

pytestmark = pytest.mark.slow

TABLES = (
    Table("a", 5000, 16, 3.0),
    Table("b", 400, 8, 5.5),
    Table("c", 70_000, 64, 2.0, pooled=False),
)
TASK = ShardingTask(TABLES, Topology(2, memory_bytes=2**30), 64)


def first_run_of(rank: Rank, journal: str, optimizer: str, budget_s: float) -> dict[str, Any]:
    """Measure plans before planning, twice, and say what is in the store, and what was planned."""
    measured, seen = count_measurements(), []
    first_run._needs_measuring = lambda *_, **__: not samples_of(context, journal)
    context = context_of_job(rank, optimizer)

    def new_planners(context: Any) -> list[Any]:
        return [len(samples_of(context, journal))]

    for _ in range(2):
        planners = first_run.after_first_run(
            [0] if rank.is_zero else None,
            rank,
            context,
            TASK,
            budget_s=budget_s,
            journal=journal,
            new_planners=new_planners,
        )
        seen.append((len(measured), planners))
    samples = list(samples_of(context, journal).values())
    return {"seen": gathered(rank, seen), "samples": samples}


@pytest.mark.parametrize("optimizer", ["rowwise_adagrad", "sgd"])
def test_two_ranks_measure_together_once(optimizer: str, tmp_path: Path) -> None:
    found = run_ranks(first_run_of, 2, str(tmp_path), optimizer, 16.0)
    first, other = found["seen"]
    assert [number for number, _ in first] == [number for number, _ in other] == [15, 15]
    assert [planners for _, planners in first] == [[15], [0]]
    assert [planners for _, planners in other] == [None, None]
    samples = found["samples"]
    assert [sample.number for sample in samples] == list(range(15))
    assert {sample.kind for sample in samples} == {"computation", "communication"}
    exchanging = [sample for sample in samples if sample.world_size == 2]
    assert exchanging
    for sample in exchanging:
        for stages in sample.cost.per_rank:
            assert all(stages.stage_ms(stage) > 0 for stage in STAGES)


def test_too_few_measurements_change_nothing(tmp_path: Path) -> None:
    """Such as those of a machine on which the time is over at once."""
    found = run_ranks(first_run_of, 2, str(tmp_path), "sgd", 1.0)
    assert found["samples"] == []
    assert found["seen"][0][-1][1] == [0]
