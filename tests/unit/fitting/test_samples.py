"""Collected costs on disk: what is read is what was measured, or an error that says what to do."""

import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from dlrm_sharded.cost.workload import workload_of_plan
from dlrm_sharded.files.errors import DataError
from dlrm_sharded.fitting.costs_file import (
    COSTS_FORMAT,
    SCHEMA,
    manifest_path,
    read_costs,
    write_costs,
)
from dlrm_sharded.fitting.samples import Sample, repeatability, workload_of_sample
from dlrm_sharded.plans.layouts import RowBlocks
from dlrm_sharded.plans.plan import Shard, ShardingPlan
from dlrm_sharded.plans.plan_cost import STAGES, PlanCost
from dlrm_sharded.plans.tables import NUM_REUSE_BINS, Table
from dlrm_sharded.plans.task import ShardingTask, Topology
from tests.unit.damage import change_a_byte, cut_off
from tests.unit.fitting.cases import sample

ONCE = (1.0, *[0.0] * (NUM_REUSE_BINS - 1))
ROOT = Path(__file__).resolve().parents[3]
SAMPLES = [
    sample(0),
    sample(1, kind="communication", times_ms=((0.1, 0.2, 0.3, 0.4, 1e-5),) * 4),
    sample(0, attempt=1, times_ms=((2, 2, 3, 4, 5), (1, 1, 1, 1, 0))),
]


@pytest.fixture
def costs(tmp_path: Path) -> Path:
    path = tmp_path / "costs.parquet"
    write_costs(path, SAMPLES, {"hardware": "cpu: test", "seed": 3})
    return path


def test_reads_what_was_written(costs: Path) -> None:
    collected = read_costs(costs)
    assert collected.samples == tuple(SAMPLES)
    assert collected.manifest["hardware"] == "cpu: test"
    assert collected.manifest["seed"] == 3
    assert collected.manifest["num_samples"] == 3
    assert collected.manifest["repeatability"] == repeatability(SAMPLES)
    assert sorted(path.name for path in costs.parent.iterdir()) == ["costs.json", "costs.parquet"]


EARLIER = ("module", "noise", "pooled", "replicated", "accesses")
"""Columns, and fields of a shard, that collections lacked once, the latest first; those without
modules had no numbers of features either."""


@pytest.mark.parametrize("missing", [EARLIER[:length] for length in range(1, 6)], ids=len)
def test_reads_earlier_collections(costs: Path, missing: tuple[str, ...]) -> None:
    edit_frame(
        lambda frame: frame.drop(set(missing) & set(frame.columns)).with_columns(
            shards=pl.col("shards").list.eval(
                pl.struct(
                    pl.element().struct.field(field.name)
                    for field in SCHEMA["shards"].inner.fields
                    if field.name not in {*missing, "num_features"}
                )
            )
        )
    )(costs)
    assert read_costs(costs).samples == tuple(SAMPLES)
    assert {shard.accesses for old in SAMPLES for shard in old.shards} == {"zipf"}
    assert not any(old.has_replicas or old.has_sequences for old in SAMPLES)


def test_a_sample_of_sequences_is_priced_as_its_plan() -> None:
    """Tables of sequences have a module of their own, and a vector for each id."""
    bag, sequence = Table("bag", 100, 8, 3.0, ONCE), Table("s", 90, 16, 5.0, ONCE, pooled=False)
    task = ShardingTask((bag, sequence), Topology(2, memory_bytes=2**30), batch_size=64)
    shards = (Shard.whole(bag, 0), *RowBlocks(range(2)).shards(sequence))
    plan = ShardingPlan(2, shards)
    cost = PlanCost.from_stages({stage: [1.0, 2.0] for stage in STAGES}, input_dist_ms=[1.0, 1.0])
    measured = Sample.of_plan(plan, task, cost, kind="computation")
    assert measured.has_sequences
    again = Sample.from_row(json.loads(json.dumps(measured.to_row())))
    found, planned = workload_of_sample(again), workload_of_plan(plan, task)
    for of_plan, of_sample in (
        (planned.num_vectors, found.num_vectors),
        (planned.num_lookups(), found.num_lookups()),
        (planned.exchange(for_ids=False).volume, found.exchange(for_ids=False).volume),
    ):
        assert of_sample.tolist() == pytest.approx(of_plan.tolist())
    launches = [of.exchange(for_ids=False).num_launches for of in (planned, found)]
    assert launches == [2, 2]


def test_first_attempts_are_of_one_kind(costs: Path) -> None:
    collected = read_costs(str(costs))
    assert collected.first_attempts("computation") == [SAMPLES[0]]
    assert collected.first_attempts("communication") == [SAMPLES[1]]


def test_a_row_survives_json() -> None:
    for measured in SAMPLES:
        assert Sample.from_row(json.loads(json.dumps(measured.to_row()))) == measured


def edit_manifest(**changes: Any) -> Callable[[Path], None]:
    def edit(path: Path) -> None:
        manifest = manifest_path(path)
        manifest.write_text(json.dumps(json.loads(manifest.read_text()) | changes))

    return edit


def put(data: bytes) -> Callable[[Path], None]:
    """Other data, with a manifest that is right about it."""

    def replace(path: Path) -> None:
        path.write_bytes(data)
        edit_manifest(sha256=hashlib.sha256(data).hexdigest())(path)

    return replace


def edit_frame(edit: Callable[[pl.DataFrame], pl.DataFrame]) -> Callable[[Path], None]:
    def rewrite(path: Path) -> None:
        edit(pl.read_parquet(path)).write_parquet(path)
        put(path.read_bytes())(path)

    return rewrite


def with_samples(*samples: Sample) -> Callable[[Path], None]:
    return lambda path: write_costs(path, samples, {})


def with_shard(**changes: Any) -> Callable[[Path], None]:
    shard = dataclasses.replace(SAMPLES[0].shards[1], **changes)
    return with_samples(dataclasses.replace(SAMPLES[0], number=7, shards=(shard,)))


def with_time(part: int, time_ms: float) -> Callable[[Path], None]:
    times = [1.0, 2.0, 3.0, 4.0, 5.0]
    times[part] = time_ms
    return with_samples(sample(7, times_ms=((1, 2, 3, 4, 5), tuple(times))))  # type: ignore[arg-type]


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "no_file": (lambda path: path.unlink(), "No such file"),
    "no_manifest": (lambda path: manifest_path(path).unlink(), r"costs\.json: No such file"),
    "truncated": (cut_off, "truncated, or changed"),
    "empty": (lambda path: path.write_bytes(b""), r"\(0 B\)"),
    "changed_byte": (change_a_byte, "truncated, or changed"),
    "no_checksum": (edit_manifest(sha256=None), "is not the file that costs.json describes"),
    "manifest_of_other_format": (edit_manifest(format=0), "not a manifest of format 1"),
    "manifest_is_a_list": (lambda p: manifest_path(p).write_text("[]"), "not a manifest"),
    "manifest_is_cut_off": (lambda p: cut_off(manifest_path(p)), "costs.json is not JSON"),
    "no_parquet": (put(b"number,kind\n1,computation\n"), "is not a Parquet file"),
    "nothing": (put(b""), "is not a Parquet file"),
    "other_columns": (edit_frame(lambda f: f.drop("attempt")), "has the columns kind, number, w"),
    "other_types": (
        edit_frame(lambda f: f.with_columns(pl.col("number").cast(pl.Int16))),
        "other types",
    ),
    "null_times": (
        edit_frame(lambda f: f.with_columns(per_rank=pl.lit(None, SCHEMA["per_rank"]))),
        "the times of the ranks are damaged",
    ),
    "null_rows": (
        edit_frame(
            lambda f: f.with_columns(
                pl.col("shards").list.eval(
                    pl.element().struct.with_fields(num_rows=pl.lit(None, pl.Int64))
                )
            )
        ),
        r"got `null` - at `\$.shards\[0\].num_rows`",
    ),
    "nan_time": (
        with_time(1, math.nan),
        "sample 7 cannot have been measured: fwd_compute on rank 1 in ms is nan",
    ),
    "negative_time": (with_time(4, -0.5), "sample 7 .*: bwd_compute on rank 1 in ms is -0.5"),
    "infinite_time": (with_time(0, math.inf), "sample 7 .*: input_dist on rank 1 in ms is inf"),
    "rank_too_high": (with_samples(sample(7, ranks=(0, 2))), "of a shard is 2, expected 0 to 1"),
    "rank_too_low": (with_samples(sample(7, ranks=(0, -1))), "rank of a shard is -1, expected 0"),
    "times_of_fewer_ranks": (
        with_samples(dataclasses.replace(sample(7), world_size=3, ranks_per_host=3)),
        "sample 7 .*: times of 2 ranks, expected 3",
    ),
    "no_shards": (with_samples(sample(7, ranks=())), "sample 7 .*: no shards"),
    "no_rows": (with_shard(num_rows=0), "num_rows of a shard is 0"),
    "negative_columns": (with_shard(num_cols=-4), "num_cols of a shard is -4"),
    "nan_ids": (with_shard(pooling_factor=math.nan), "pooling_factor of a shard is nan"),
    "no_feature": (
        with_shard(num_features=0),
        "num_features of a shard is 0, expected 1 to 10,000",
    ),
    "unknown_module": (with_shard(module=3), "module of a shard is 3, expected 0 to 0"),
    "short_histogram": (
        with_shard(reuse_histogram=(1.0,)),
        "reuse_histogram of 1 bins, expected 17",
    ),
    "negative_share": (
        with_shard(reuse_histogram=(-1.0,) * NUM_REUSE_BINS),
        "a share of reuse_histogram is -1.0",
    ),
}


@pytest.mark.parametrize(("damage", "what"), DAMAGE.values(), ids=DAMAGE)
def test_says_what_is_wrong_and_what_to_do(
    costs: Path, damage: Callable[[Path], None], what: str
) -> None:
    damage(costs)
    with pytest.raises(DataError, match=what) as error:
        read_costs(costs)
    assert str(costs) in str(error.value) or str(manifest_path(costs)) in str(error.value)
    assert "dlrm-calibrate" in str(error.value)


def test_without_its_manifest_new_data_is_not_read(costs: Path) -> None:
    """As a kill leaves it between the two files of `write_costs`."""
    manifest = manifest_path(costs).read_text()
    write_costs(costs, SAMPLES[:1], {})
    manifest_path(costs).write_text(manifest)
    with pytest.raises(DataError, match=r"is not the file that costs\.json describes"):
        read_costs(costs)


def test_the_page_names_all_columns_of_the_file() -> None:
    """With their units: a name ends with _ms exactly if the page says ms."""
    page = (ROOT / "docs" / "reference" / "files.md").read_text()
    section = page.split("## The measurements: costs.parquet")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `([^`]+)` \| *(.*?) *\| (.+) \|$", section, re.M)
    columns = []
    for name, kind in SCHEMA.items():
        inner = kind.inner if isinstance(kind, pl.List) else None
        fields = inner.fields if isinstance(inner, pl.Struct) else []
        columns += [f"{name}[].{field.name}" for field in fields] or [name]
    assert [name for name, _, _ in rows] == columns
    assert all(name.endswith("_ms") == (unit == "ms") for name, unit, _ in rows)
    assert f"`format`, {COSTS_FORMAT} today" in section
