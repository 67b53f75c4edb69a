"""What users import: sharders by name, tasks from frames, plans and costs as frames."""

import json
from typing import Any

import numpy as np
import polars as pl
import pytest

import dlrm_sharded as d
from dlrm_sharded.commands.yamls import CONF_DIR

FRAME = pl.DataFrame(
    {
        "name": ["a", "b", "c"],
        "num_embeddings": np.array([1000, 2000, 50]),
        "embedding_dim": [16, 32, 64],
        "pooling_factor": [1.0, 2.5, 3.0],
        "owner": ["x", "y", "z"],
    }
)
SHARDERS = sorted({path.stem for path in (CONF_DIR / "sharder").glob("*.yaml")} - {"plan_file"})
TOPOLOGY = d.Topology(np.int64(2), np.int64(10**9), compute_device="cpu")  # type: ignore[arg-type]


def task(frame: Any = FRAME) -> d.ShardingTask:
    return d.task_from_frame(frame, TOPOLOGY, np.int32(512))  # type: ignore[arg-type]


def test_names_are_those_that_users_import() -> None:
    assert dir(d) == sorted(d.__all__)
    assert all(getattr(d, name) is not None for name in dir(d))


def test_a_frame_is_a_task_and_numbers_of_numpy_are_numbers() -> None:
    found = task()
    assert found.tables[1] == d.Table("b", 2000, 32, 2.5)
    assert json.loads(json.dumps(found.to_json())) == found.to_json()
    assert task(FRAME.to_dict(as_series=False)) == found
    table = d.Table("t", np.int64(10), np.int32(8), np.float32(1.5))  # type: ignore[arg-type]
    assert (type(table.num_embeddings), type(table.pooling_factor)) == (int, float)


@pytest.mark.parametrize(
    ("frame", "said"),
    [
        (FRAME.drop("name", "pooling_factor"), "has no column name, pooling_factor; it needs name"),
        (FRAME.with_columns(embedding_dim=7), "embedding_dim is 7"),
        (FRAME.with_columns(name=pl.lit("a")), "'a'"),
    ],
    ids=["missing", "wrong", "twice"],
)
def test_a_frame_that_is_no_task(frame: pl.DataFrame, said: str) -> None:
    with pytest.raises(d.ConfigError, match=said):
        task(frame)


@pytest.mark.parametrize("name", SHARDERS)
def test_a_sharder_plans_alike_by_itself_and_in_a_planner(name: str) -> None:
    """Also tables whose accesses nobody knows, of which both assume the same."""
    rng = np.random.default_rng(0)
    tables = [
        d.Table(f"t{i}", int(rng.integers(100, 10**6)), 16, float(rng.integers(1, 40)))
        for i in range(12)
    ]
    unprofiled = d.ShardingTask(tuple(tables), TOPOLOGY, 4096)
    model = d.learned_cost_model(d.RunContext())
    made = [d.make_sharder(name, model) for _ in range(2)]
    assert made[0].shard(unprofiled) == d.Planner(made[1], model).plan(unprofiled)[0]


def test_a_plan_of_ones_own_is_costed_and_shown_as_frames() -> None:
    plan = d.ShardingPlan.from_ranks(task(), np.array([0, 1, 0]))  # type: ignore[arg-type]
    d.validate(plan, task())
    shards = plan.to_frame()
    assert shards["rank"].to_list() == [0, 1, 0]
    assert shards.filter(table="b").row(0) == ("b", 1, 0, 2000, 0, 32, False, "fp32")
    cost = d.learned_cost_model(d.RunContext("cpu")).predict(plan, task())
    ranks = cost.to_frame()
    assert ranks["total_ms"].max() == pytest.approx(cost.cost_ms)
    assert ranks.select(pl.sum_horizontal("^.*_(compute|comm)_ms$")).to_series().to_list() == (
        pytest.approx(ranks["total_ms"].to_list())
    )


@pytest.mark.parametrize("name", ["dim", "search", "torchrec"])
def test_a_sharder_by_its_name(name: str) -> None:
    run = d.RunContext("cpu")
    sharder = d.make_sharder(name, d.learned_cost_model(run), run=run, seed=3)
    d.validate(sharder.shard(task()), task())


def test_options_of_a_sharder_are_those_of_its_yaml() -> None:
    model = d.learned_cost_model(d.RunContext("cpu"))
    sharder = d.make_sharder("search", model, seed=7, replicate="never", patience=1)
    assert isinstance(sharder, d.SearchSharder)
    assert (sharder.seed, sharder.patience, sharder.constraints.replicate) == (7, 1, "never")


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("dimm", {}, "there is no sharder 'dimm'; known: autoshard, "),
        ("dim", {"wait": 1}, "sharder dim has no option 'wait'; known: seed, weight"),
    ],
)
def test_a_sharder_that_is_not_there(name: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(d.ConfigError, match=said):
        d.make_sharder(name, **options)
