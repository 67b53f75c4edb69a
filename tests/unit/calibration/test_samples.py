"""Collected costs on disk: what is read is what was measured, or an error that says what to do."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from dlrm_sharded.calibration.costs_file import read_costs
from dlrm_sharded.calibration.samples import Sample, workload_of_sample
from dlrm_sharded.cost.workload import workload_of_plan
from dlrm_sharded.files.errors import DataError
from dlrm_sharded.plans.layouts import RowBlocks
from dlrm_sharded.plans.plan import Shard, ShardingPlan
from dlrm_sharded.plans.plan_cost import STAGES, PlanCost
from dlrm_sharded.plans.tables import Table
from tests.unit.calibration.cases import sample
from tests.unit.calibration.costs_of_02 import write_costs
from tests.unit.cost.hardware import MANIFEST
from tests.unit.synthetic import task_of

SAMPLES = [
    sample(0),
    sample(1, kind="communication", times_ms=((0.1, 0.2, 0.3, 0.4, 1e-5),) * 4),
    sample(0, times_ms=((2, 2, 3, 4, 5), (1, 1, 1, 1, 0))),
]


@pytest.fixture
def costs(tmp_path: Path) -> Path:
    path = tmp_path / "costs.parquet"
    write_costs(path, SAMPLES, MANIFEST)
    return path


def test_reads_what_was_written(costs: Path) -> None:
    samples, context = read_costs(costs)
    assert samples == SAMPLES
    assert (context.device, context.optimizer) == ("cpu", "rowwise_adagrad")
    assert context.hardware.name == "synthetic"


EARLIER = ("module", "noise", "pooled", "replicated")
"""Columns, and fields of a shard, that collections lacked once, the latest first; those without
modules had no numbers of features either."""


@pytest.mark.parametrize("missing", [EARLIER[:length] for length in range(1, 5)], ids=len)
def test_reads_earlier_collections(costs: Path, missing: tuple[str, ...]) -> None:
    edit_frame(
        lambda frame: frame.drop(set(missing) & set(frame.columns)).with_columns(
            shards=pl.col("shards").list.eval(
                pl.struct(
                    pl.element().struct.field(field.name)
                    for field in frame.schema["shards"].inner.fields
                    if field.name not in {*missing, "num_features"}
                )
            )
        )
    )(costs)
    assert read_costs(costs)[0] == SAMPLES


def test_a_sample_of_sequences_is_costed_as_its_plan() -> None:
    """Tables of sequences have a module of their own, and a vector for each id."""
    bag, sequence = Table("bag", 100, 8, 3.0), Table("s", 90, 16, 5.0, pooled=False)
    task = task_of((bag, sequence), batch_size=64)
    shards = (Shard.whole(bag, 0), *RowBlocks(range(2)).shards(sequence))
    plan = ShardingPlan(2, shards)
    cost = PlanCost.from_stages({stage: [1.0, 2.0] for stage in STAGES}, input_dist_ms=[1.0, 1.0])
    measured = Sample.of_plan(plan, task, cost, kind="computation")
    assert any(not shard.pooled for shard in measured.shards)
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


def test_a_row_survives_json() -> None:
    for measured in SAMPLES:
        assert Sample.from_row(json.loads(json.dumps(measured.to_row()))) == measured


def edit_frame(edit: Callable[[pl.DataFrame], pl.DataFrame]) -> Callable[[Path], None]:
    """Other data, with a manifest that is right about it."""

    def rewrite(path: Path) -> None:
        edit(pl.read_parquet(path)).write_parquet(path)
        manifest = path.with_suffix(".json")
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"sha256": digest}))

    return rewrite


def slower(factor: float) -> Callable[[pl.DataFrame], pl.DataFrame]:
    def edit(frame: pl.DataFrame) -> pl.DataFrame:
        times = pl.element().struct.with_fields(pl.field("fwd_compute_ms") * factor)
        return frame.with_columns(per_rank=pl.col("per_rank").list.eval(times))

    return edit


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no file": (Path.unlink, "No such file"),
    "no manifest": (lambda path: path.with_suffix(".json").unlink(), "No such file"),
    "other data": (lambda path: path.write_bytes(b"PAR1"), "is not the file that costs.json"),
    "no column": (edit_frame(lambda frame: frame.drop("kind")), "missing required field `kind`"),
    "no times": (edit_frame(lambda frame: frame.drop("per_rank")), "times of the ranks"),
    "absurd times": (edit_frame(slower(1e12)), "fwd_compute on rank 0 in ms is"),
    "no manifest of ours": (lambda path: path.with_suffix(".json").write_text("{}"), "missing"),
}


@pytest.mark.parametrize(("damage", "message"), DAMAGES.values(), ids=DAMAGES)
def test_damaged_costs_are_refused(costs: Path, damage: Any, message: str) -> None:
    damage(costs)
    with pytest.raises(DataError, match="cannot be used") as error:
        read_costs(costs)
    assert message in str(error.value)
