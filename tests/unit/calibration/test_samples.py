"""Collected costs on disk: what is read is what was measured, or an error that says what to do."""

import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from dlrm_sharded.calibration.costs_file import (
    COSTS_FORMAT,
    SCHEMA,
    manifest_path,
    read_costs,
    write_costs,
)
from dlrm_sharded.calibration.samples import Sample, repeatability, workload_of_sample
from dlrm_sharded.cost.workload import workload_of_plan
from dlrm_sharded.files.errors import DataError
from dlrm_sharded.plans.layouts import RowBlocks
from dlrm_sharded.plans.plan import Shard, ShardingPlan
from dlrm_sharded.plans.plan_cost import STAGES, PlanCost
from dlrm_sharded.plans.tables import NUM_REUSE_BINS, Table
from dlrm_sharded.plans.task import ShardingTask, Topology
from tests.unit.calibration.cases import sample

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
