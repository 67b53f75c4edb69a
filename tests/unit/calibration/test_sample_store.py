import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest

from dlrm_sharded import PlanCost, StageCost, Table
from dlrm_sharded.accesses.profiles import with_profiles
from dlrm_sharded.calibration import sample_store
from dlrm_sharded.calibration.sample_store import MAX_RUNS, Conditions, SampleStore, sample_of_run
from dlrm_sharded.calibration.samples import TIMES, Sample, workload_of_sample
from dlrm_sharded.cost.features import profile_of, work_of
from dlrm_sharded.cost.workload import Workload, workload_of_plan
from dlrm_sharded.plans.layouts import RowBlocks
from dlrm_sharded.plans.plan import Shard, ShardingPlan
from tests.unit.synthetic import column_shards, task_of

SGD = Conditions("sgd", 2)
TIME_KEYS = [f"{name}_ms" for name in TIMES]
TABLES = (Table("a", 1000, 16, 2.0), Table("b", 500, 32, 5.0), Table("c", 10, 8, 1.0))
TASK = with_profiles(task_of(TABLES, memory_bytes=2**30, batch_size=64))
PLAN = ShardingPlan(
    2,
    (
        *column_shards(TABLES[0], (0, 4), (1, 12)),
        *RowBlocks(range(2)).shards(TABLES[1]),
        Shard.whole(TABLES[2], 1),
    ),
)
COST = PlanCost((StageCost(1.0, 2.0, 3.0, 4.0), StageCost(4.0, 3.0, 2.0, 1.0)), (0.5, 0.75))


@pytest.fixture
def journal(tmp_path: Path) -> SampleStore:
    return SampleStore(tmp_path / "runs" / "hardware.jsonl")


@pytest.fixture
def run() -> Sample:
    return sample_of_run(PLAN, TASK, COST)


def test_a_run_is_the_plan_that_it_measured(run: Sample) -> None:
    ours, planned = workload_of_sample(run), workload_of_plan(PLAN, TASK)
    for field in dataclasses.fields(Workload):
        found, expected = getattr(ours, field.name), getattr(planned, field.name)
        assert found == pytest.approx(expected, abs=1e-6), field.name
    assert work_of(ours) == pytest.approx(work_of(planned), rel=1e-5)
    assert profile_of(ours) == pytest.approx(profile_of(planned), abs=1e-5)
    assert run.cost == COST


def test_reads_what_was_written_under_the_same_conditions(
    journal: SampleStore, run: Sample
) -> None:
    assert journal.read(SGD) == {}
    slower = dataclasses.replace(run, cost=PlanCost(COST.per_rank[::-1], COST.input_dist_ms))
    journal.append(SGD, run)
    journal.append(Conditions("adam", 2), run)
    journal.append(Conditions("sgd", 4), run)
    journal.append(SGD, slower)
    assert journal.read(SGD) == {1: run, 4: slower}


@pytest.mark.parametrize(
    ("there", "here", "optimizer", "counts"),
    [
        (None, "1.8.0", "rowwise_adagrad", True),
        ("1.8.0", "1.8.0", "rowwise_adagrad", True),
        ("1.8.0", "1.9.0", "rowwise_adagrad", False),
    ],
)
def test_runs_with_other_kernels_do_not_count(
    journal: SampleStore, run: Sample, there: str | None, here: str, optimizer: str, counts: bool
) -> None:
    journal.append(Conditions(optimizer, 2, there), run)
    if there is None:  # as earlier versions wrote it
        journal.path.write_text(journal.path.read_text().replace('"fbgemm": null, ', ""))
    assert journal.read(Conditions(optimizer, 2, here)) == ({1: run} if counts else {})


def test_the_latest_runs_count_and_do_not_displace_drawn_plans(
    journal: SampleStore, run: Sample, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sample_store, "MAX_SAMPLES", MAX_RUNS + 2)
    for number in range(MAX_RUNS + 8):
        kind = "computation" if number < 3 else run.kind
        journal.append(SGD, dataclasses.replace(run, kind=kind, number=number))
    expected = [1, 2, *range(8, MAX_RUNS + 8)]
    assert [found.number for found in journal.read(SGD).values()] == expected


IMPOSSIBLE = {
    "no_batch": ("batch_size", 0),
    "huge_batch": ("batch_size", 10**30),
    "no_ranks": ("world_size", 0),
    "no_ranks_per_host": ("ranks_per_host", 0),
    "hosts_of_other_sizes": ("ranks_per_host", 1.5),
    "half_a_rank": ("shards.0.rank", 0.5),
    "rank_beyond": ("shards.0.rank", 2),
    "negative_ids": ("shards.0.pooling_factor", -1.0),
    "histogram": ("shards.0.reuse_histogram.0", 0.5 + 1 / 3),
    "row_wise_is_a_number": ("shards.0.row_wise", 1),
    "no_shards": ("shards", []),
    "times_of_one_rank": ("per_rank", [{}]),
    "nan": ("per_rank.0.fwd_comm_ms", math.nan),
    "negative": ("per_rank.0.fwd_comm_ms", -1.0),
    "infinite": ("per_rank.0.fwd_comm_ms", 1e308),
    "longer_than_an_hour": ("per_rank.0.fwd_comm_ms", 4e6),
    "below_a_nanosecond": ("per_rank.0.fwd_comm_ms", 1e-9),
    "more_than_a_float": ("per_rank.0.input_dist_ms", 10**400),
    "too_fast_for_any_hardware": ("batch_size", 2**40),
    "no_computation": ("per_rank.0", dict.fromkeys(TIME_KEYS, 0)),
    "null": ("per_rank.0", None),
}


@pytest.mark.parametrize(("key", "value"), IMPOSSIBLE.values(), ids=IMPOSSIBLE)
def test_what_cannot_have_been_measured_is_named(
    journal: SampleStore, run: Sample, caplog: pytest.LogCaptureFixture, key: str, value: object
) -> None:
    journal.append(SGD, run)
    whole = journal.path.read_bytes()
    fields = json.loads(whole)
    at: Any = fields["run"]
    *path, last = [int(part) if part.isdigit() else part for part in key.split(".")]
    for part in path:
        at = at[part]
    at[last] = value
    journal.path.write_bytes(json.dumps(fields).encode() + b"\n" + whole)
    assert journal.read(SGD) == {2: run}
    [said] = caplog.messages
    assert f"1 of 2 lines of the journal of samples {journal.path}" in said
    assert "line 1 (" in said
