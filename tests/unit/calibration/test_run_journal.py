import dataclasses
import json
import logging
from pathlib import Path

import pytest

from dlrm_sharded.calibration.run_journal import MAX_RUNS, Conditions, RunJournal, measured_run
from dlrm_sharded.calibration.samples import workload_of_sample
from dlrm_sharded.cost.features import workload_of_plan
from dlrm_sharded.layouts import Replicas, RowBlocks
from dlrm_sharded.plan import Shard, ShardingPlan
from dlrm_sharded.plan_cost import PlanCost, StageCost
from dlrm_sharded.profiles import with_profiles
from dlrm_sharded.tables import Table
from dlrm_sharded.task import ShardingTask, Topology

SGD = Conditions("sgd", 2)
TABLES = (Table("a", 1000, 16, 2.0), Table("b", 500, 32, 5.0), Table("c", 10, 8, 1.0))
TASK = with_profiles(ShardingTask(TABLES, Topology(2, memory_bytes=2**30), 64))
PLAN = ShardingPlan(
    2,
    (
        Shard("a", 0, (0, 1000), (0, 4)),
        Shard("a", 1, (0, 1000), (4, 16)),
        *RowBlocks(range(2)).shards(TABLES[1]),
        Shard.whole(TABLES[2], 1),
    ),
)
COST = PlanCost((StageCost(1.0, 2.0, 3.0, 4.0), StageCost(4.0, 3.0, 2.0, 1.0)), (0.5, 0.75))


@pytest.fixture
def journal(tmp_path: Path) -> RunJournal:
    return RunJournal(tmp_path / "runs" / "hardware.jsonl")


def test_a_run_is_the_plan_that_it_measured() -> None:
    run = measured_run(PLAN, TASK, COST)
    assert run is not None
    ours, planned = workload_of_sample(run), workload_of_plan(PLAN, TASK)
    for field in ("rank", "group_size", "num_rows", "num_cols", "num_ids"):
        assert getattr(ours, field) == pytest.approx(getattr(planned, field))
    assert ours.reuse_histogram == pytest.approx(planned.reuse_histogram, abs=1e-6)
    assert run.cost == COST


def test_row_blocks_within_a_host_are_not_noted() -> None:
    hosts = dataclasses.replace(TASK, topology=Topology(4, memory_bytes=2**30, local_world_size=2))
    shards = (
        Shard.whole(TABLES[0], 0),
        *RowBlocks(range(2)).shards(TABLES[1]),
        Shard.whole(TABLES[2], 3),
    )
    cost = PlanCost((StageCost(1.0, 1.0, 1.0, 1.0),) * 4, (0.5,) * 4)
    assert measured_run(ShardingPlan(4, shards), hosts, cost) is None


def test_replicas_are_noted() -> None:
    shards = (*Replicas(2).shards(TABLES[0]), Shard.whole(TABLES[1], 0), Shard.whole(TABLES[2], 1))
    plan = ShardingPlan(2, shards)
    run = measured_run(plan, TASK, COST)
    assert run is not None
    assert run.has_replicas
    noted, planned = workload_of_sample(run), workload_of_plan(plan, TASK)
    assert noted.is_replica.tolist() == planned.is_replica.tolist() == [True, True, False, False]
    assert noted.num_ids == pytest.approx(planned.num_ids)
    assert noted.exchange(for_ids=False).replica_bytes == 4 * TABLES[0].num_embeddings * (
        TABLES[0].embedding_dim
    )


def test_reads_what_was_written_under_the_same_conditions(journal: RunJournal) -> None:
    assert journal.read(SGD) == []
    run = measured_run(PLAN, TASK, COST)
    assert run is not None
    slower = dataclasses.replace(run, cost=PlanCost(COST.per_rank[::-1], COST.input_dist_ms))
    journal.append(SGD, run)
    journal.append(Conditions("adam", 2), run)
    journal.append(Conditions("sgd", 4), run)
    journal.append(SGD, slower)
    assert journal.read(SGD) == [run, slower]


def test_the_latest_runs_count(journal: RunJournal) -> None:
    run = measured_run(PLAN, TASK, COST)
    assert run is not None
    for number in range(MAX_RUNS + 5):
        journal.append(SGD, dataclasses.replace(run, number=number))
    assert [found.number for found in journal.read(SGD)] == list(range(5, MAX_RUNS + 5))


DAMAGE = {
    "no_json": b"{",
    "a_number": b"7",
    "empty": b"",
    "binary": b"\xff\x00\xfe",
    "other_format": b'{"format": 9}',
    "no_run": b'{"format": 1, "optimizer": "sgd", "ranks_per_host": 2}',
    "deep": b"[" * 100_000,
}


@pytest.mark.parametrize("line", DAMAGE.values(), ids=DAMAGE)
def test_damaged_lines_are_passed_over(
    journal: RunJournal, caplog: pytest.LogCaptureFixture, line: bytes
) -> None:
    run = measured_run(PLAN, TASK, COST)
    assert run is not None
    journal.append(SGD, run)
    with journal.path.open("ab") as file:
        file.write(line + b"\n")
    journal.append(SGD, run)
    before = journal.path.read_bytes()
    assert journal.read(SGD) == [run, run]
    [said] = caplog.messages
    assert "1 of 3 lines of the journal" in said
    assert journal.path.read_bytes() == before, "nothing is deleted"


@pytest.mark.parametrize("time_ms", [-1.0, float("nan"), float("inf"), "fast", None])
def test_times_that_no_measurement_gives(
    journal: RunJournal, caplog: pytest.LogCaptureFixture, time_ms: object
) -> None:
    run = measured_run(PLAN, TASK, COST)
    assert run is not None
    journal.append(SGD, run)
    fields = json.loads(journal.path.read_text())
    fields["run"]["per_rank"][0]["fwd_comm_ms"] = time_ms
    journal.path.write_text(json.dumps(fields) + "\n")
    assert journal.read(SGD) == []
    assert len(caplog.messages) == 1


def test_a_line_that_was_cut_off_does_not_damage_the_next(journal: RunJournal) -> None:
    run = measured_run(PLAN, TASK, COST)
    assert run is not None
    journal.append(SGD, run)
    whole = journal.path.read_bytes()
    journal.path.write_bytes(whole + whole[: len(whole) // 2])
    journal.append(SGD, run)
    assert journal.read(SGD) == [run, run]


def test_a_folder_that_cannot_be_written_costs_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "runs").write_text("a file is in the way")
    journal = RunJournal(tmp_path / "runs" / "hardware.jsonl")
    run = measured_run(PLAN, TASK, COST)
    assert run is not None
    with caplog.at_level(logging.WARNING):
        journal.append(SGD, run)
        assert journal.read(SGD) == []
    assert "is not noted in the journal" in caplog.messages[0]
