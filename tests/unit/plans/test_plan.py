"""Plans: their checks, their memory and their files."""

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrm_sharded import ConfigError, InvalidPlanError, Table, validate
from dlrm_sharded.files.json_files import write_json
from dlrm_sharded.plans.layouts import row_blocks
from dlrm_sharded.plans.plan import Shard, ShardingPlan, read_plan
from dlrm_sharded.plans.task import GIB, ShardingTask, Topology, read_task
from tests.unit.synthetic import task_of

TABLE = Table("t", 100, 16, 2.0)


def task(world_size: int = 2, memory: int = 10**6, **topology: Any) -> ShardingTask:
    return task_of([TABLE], world_size, memory, 64, **{"device": "cuda", **topology})


def plan(*shards: Shard, world_size: int = 2) -> ShardingPlan:
    return ShardingPlan(world_size, shards)


def shard(rank: int, rows: tuple[int, int] = (0, 100), cols: tuple[int, int] = (0, 16)) -> Shard:
    return Shard("t", rank, rows, cols)


def replica(rank: int) -> Shard:
    return dataclasses.replace(shard(rank), replicated=True)


VALID = {
    "whole": plan(shard(1)),
    "columns": plan(shard(0, cols=(0, 4)), shard(1, cols=(4, 16))),
    "columns-same_rank": plan(
        shard(0, cols=(0, 4)), shard(1, cols=(4, 12)), shard(0, cols=(12, 16))
    ),
    "rows": plan(shard(0, rows=(0, 50)), shard(1, rows=(50, 100))),
    "rows-any_order": plan(shard(1, rows=(50, 100)), shard(0, rows=(0, 50))),
    "replicas": plan(replica(1), replica(0)),
    "replica-alone": plan(replica(0), world_size=1),
}


@pytest.mark.parametrize("name", VALID)
def test_valid(name: str) -> None:
    validate(VALID[name], task(VALID[name].world_size))


@pytest.mark.parametrize("name", VALID)
def test_json_there_and_back(name: str) -> None:
    fields = json.loads(json.dumps(VALID[name].to_json()))
    assert ShardingPlan.from_json(fields) == VALID[name]
    assert fields.keys() == {"world_size", "shards"}
    has_key = ["replicated" in fields_of_shard for fields_of_shard in fields["shards"]]
    assert has_key == [shard.replicated for shard in VALID[name].shards]


INVALID = {
    "world_size": (plan(shard(0), world_size=3), "for 3 ranks, the job has 2"),
    "missing_table": (plan(), "'t' is in no shard"),
    "unknown_table": (plan(shard(0), Shard("u", 0, (0, 1), (0, 4))), "'u' that the task"),
    "rank": (plan(shard(2)), "ranks are 0 to 1"),
    "negative_rank": (plan(shard(-1)), "ranks are 0 to 1"),
    "rows_out": (plan(shard(0, rows=(0, 101))), r"part of \[0, 100\)"),
    "cols_out": (plan(shard(0, cols=(0, 20))), r"part of \[0, 16\)"),
    "empty": (plan(shard(0), shard(1, cols=(4, 4))), "non-empty"),
    "replica-missing": (plan(replica(1)), r"replicas on the ranks \[1\]; .* all 2 ranks"),
    "replica-twice": (plan(replica(0), replica(0)), r"on the ranks \[0, 0\]"),
    "replica-mixed": (plan(replica(0), shard(1)), r"replicas on the ranks \[0\]; .* all 2 ranks"),
    "replica-part": (
        plan(replica(0), dataclasses.replace(replica(1), rows=(0, 50))),
        "replicates a table whole",
    ),
    "multiple_of_4": (plan(shard(0, cols=(0, 6)), shard(1, cols=(6, 16))), "multiples of 4"),
    "overlap": (
        plan(shard(0, cols=(0, 12)), shard(1, cols=(8, 16))),
        r"cols \[8, 12\) are in two shards",
    ),
    "twice": (plan(shard(0), shard(1)), r"cols \[0, 16\) are in two shards"),
    "gap": (plan(shard(0, cols=(0, 4)), shard(1, cols=(8, 16))), r"cols \[4, 8\) are in no shard"),
    "end_gap": (plan(shard(0, cols=(0, 4))), r"cols \[4, 16\) are in no shard"),
    "row_gap": (plan(shard(0, rows=(0, 50))), r"split by rows as rank 0: \[0, 50\); TorchRec"),
    "uneven_rows": (
        plan(shard(0, rows=(0, 60)), shard(1, rows=(60, 100))),
        "even blocks of 50 rows over all 2 ranks",
    ),
    "rows_on_one_rank": (
        plan(shard(0, rows=(0, 50)), shard(0, rows=(50, 100))),
        "even blocks of 50",
    ),
    "rows_swapped": (plan(shard(1, rows=(0, 50)), shard(0, rows=(50, 100))), "in rank order"),
    "widths": (
        plan(shard(0, cols=(0, 4)), shard(1, cols=(4, 8)), shard(0, cols=(8, 16))),
        r"the widths \[4, 8\] on rank 0",
    ),
    "grid": (
        plan(
            shard(0, (0, 50), (0, 8)),
            shard(1, (50, 100), (0, 8)),
            shard(0, (0, 50), (8, 16)),
            shard(1, (50, 100), (8, 16)),
        ),
        "split by rows and by columns",
    ),
}


@pytest.mark.parametrize("name", INVALID)
def test_invalid(name: str) -> None:
    bad, message = INVALID[name]
    with pytest.raises(InvalidPlanError, match=message):
        validate(bad, task())


def test_memory_counts_optimizer_state() -> None:
    exactly = 100 * 16 * 4
    validate(plan(shard(0)), task(memory=exactly))
    with pytest.raises(InvalidPlanError, match=r"rank 0 would hold 6,800 B.*it has 6,400 B"):
        validate(plan(shard(0)), task(memory=exactly, optimizer_bytes_per_row=4))
    with pytest.raises(InvalidPlanError, match="19,200 B"):
        validate(plan(shard(0)), task(memory=exactly, bytes_per_element=12))

    by_rank = task(memory=10**9, memory_bytes_by_rank=(exactly - 1, exactly))
    validate(plan(shard(1)), by_rank)
    with pytest.raises(InvalidPlanError, match=r"rank 0 would hold 6,400 B.*it has 6,399 B"):
        validate(plan(shard(0)), by_rank)
    validate(VALID["replicas"], task(memory=exactly * 3))  # with their gradients
    with pytest.raises(InvalidPlanError, match=r"rank 0 would hold 19,200 B.*replica of t"):
        validate(VALID["replicas"], task(memory=exactly * 3 - 1))


def test_memory_in_words() -> None:
    assert Topology(3, 7).rank_memory_bytes == (7, 7, 7)
    assert Topology(2, 3 * GIB).rank_memory_text == "3.00 GiB"
    different = Topology(3, 1, memory_bytes_by_rank=(2 * GIB, 3 * GIB, 3 * GIB // 2))
    assert different.rank_memory_bytes == (2 * GIB, 3 * GIB, 3 * GIB // 2)
    assert different.rank_memory_text == "1.50 to 3.00 GiB"
    nearly = Topology(2, 1, memory_bytes_by_rank=(2 * GIB, 2 * GIB + 1))
    assert nearly.rank_memory_text == "2.00 GiB"


def test_rows_over_one_host() -> None:
    two_hosts = task(4, local_world_size=2)
    validate(plan(shard(2, rows=(0, 50)), shard(3, rows=(50, 100)), world_size=4), two_hosts)
    with pytest.raises(InvalidPlanError, match="ranks of one host"):
        validate(plan(shard(1, rows=(0, 50)), shard(2, rows=(50, 100)), world_size=4), two_hosts)


@given(st.integers(1, 10_000), st.integers(1, 64))
def test_row_blocks_tile(rows: int, blocks: int) -> None:
    found = row_blocks(rows, blocks)
    assert found[0][0] == 0
    assert found[-1][1] == rows
    assert all(a[1] == b[0] for a, b in itertools.pairwise(found))
    assert len(found) <= blocks
    assert all(stop - start == found[0][1] for start, stop in found[:-1])


def read(path: Path, text: str) -> ShardingPlan:
    path.write_text(text)
    return read_plan(path)


def shards_text(**change: Any) -> str:
    return json.dumps({"world_size": 1, "shards": [plan(shard(0)).to_json()["shards"][0] | change]})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"world_size": 1, "world_size": 2, "shards": []}', "'world_size' is there 2 times"),
        ('{"world_size": 1, "shards": [{"rank": 0, "rank": 1}]}', "'rank' is there 2 times"),
        ('{"world_size": 1, "shards": [{"row": 0}]}', r"field `table` - at `\$.shards\[0\]`"),
        ('{"world_size": 1, "shards": {}}', r"`array`, got `object` - at `\$.shards`"),
        ('{"world_size": 1, "shards": [3]}', r"does not have the form .*`\$.shards\[0\]`"),
        (shards_text(table=3), r"`str`, got `int` - at `\$.shards\[0\].table`"),
        (shards_text(rank="0"), r"plan.json does .* `int`, got `str` - at `\$.shards\[0\].rank`"),
        (shards_text(rows=[0]), r"of length 2, got 1 - at `\$.shards\[0\].rows`"),
        (shards_text(raw=1), r"unknown field `raw` - at `\$.shards\[0\]`; known: table, rank,"),
        (shards_text(precision="fp8"), r"'fp8'; known: fp32, fp16 - at `\$.shards\[0\]`"),
    ],
)
def test_keys_of_a_plan_file(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises((ConfigError, InvalidPlanError), match=message):
        read(tmp_path / "plan.json", text)


def test_missing_files(tmp_path: Path) -> None:
    for reader, noun in ((read_plan, "plan"), (read_task, "task")):
        with pytest.raises(ConfigError, match=f"cannot read the {noun} file"):
            reader(tmp_path / "none.json")
    with pytest.raises(ConfigError, match="cannot write"):
        write_json(tmp_path / "none" / "plan.json", {})
