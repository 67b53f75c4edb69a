"""Draws inputs of every kind, and reads them as the commands do."""

from __future__ import annotations

import functools
import gzip
import json
import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hydra import compose, initialize_config_dir
from hypothesis import strategies as st
from omegaconf import OmegaConf
from safetensors import safe_open
from safetensors.numpy import load_file

from dlrm_sharded.calibration.priors import learned_cost_model
from dlrm_sharded.commands.sharders import planner_factory
from dlrm_sharded.commands.train import job_settings
from dlrm_sharded.commands.yamls import CONF_DIR, option_node, options_of
from dlrm_sharded.datasets.base import check_batch
from dlrm_sharded.datasets.criteo_sample import write_criteo_sample
from dlrm_sharded.datasets.good_rows import RowTally, read_good_rows
from dlrm_sharded.datasets.schema import read_schema
from dlrm_sharded.hardware.artifact import HEADER, write_artifact
from dlrm_sharded.hardware.context import RunContext
from dlrm_sharded.plans.plan import ShardingPlan
from dlrm_sharded.plans.plan_report import PlanReport, plan_json
from dlrm_sharded.plans.tables import NUM_REUSE_BINS, Table
from dlrm_sharded.plans.task import ShardingTask, Topology, read_task
from dlrm_sharded.plans.validation import validate
from dlrm_sharded.ranks.distributed import Rank
from dlrm_sharded.sharders.heuristics import GreedySharder
from dlrm_sharded.sharders.plan_file import PlanFileSharder
from dlrm_sharded.sharders.planning import Planner
from tests.soak.input_mutations import ODD_NUMBERS, changed_json, damaged
from tests.unit.hardware.test_damaged_artifacts import LOADERS, shipped

Strategy = st.SearchStrategy[Any]

CPU = RunContext(device="cpu")
ONE_RANK = Rank(0, 1, 0, 1, torch.device("cpu"))
HISTOGRAM = (0.5, 0.25, 0.25) + (0.0,) * (NUM_REUSE_BINS - 3)
TASK = ShardingTask(
    (
        Table("a", 1000, 16, 2.0, HISTOGRAM),
        Table("b", 70, 64, 1.0),
        Table("c", 5, 4, 0.0, HISTOGRAM),
    ),
    Topology(2, 10**6, 2, 4, 4, "cpu", 1e9, 1e9, (10**6, 10**5)),
    batch_size=64,
)
PLAN = ShardingPlan.from_ranks(TASK, [0, 1, 1])


@functools.cache
def _cost_model() -> Any:
    return learned_cost_model(CPU)


def _text_of_json(base: dict[str, Any]) -> Strategy:
    """Draw the bytes of a JSON file: another value, or other bytes."""
    valid = json.dumps(base, indent=1).encode()
    changed = changed_json(base).map(lambda value: json.dumps(value).encode())
    return st.one_of(changed, changed, damaged(valid), st.binary(max_size=40))


def _check_report(plan: ShardingPlan, report: PlanReport, task: ShardingTask) -> None:
    """Assert that plan.json is JSON, and describes a plan of the task."""
    text = json.dumps(plan_json(plan, report), allow_nan=False)
    assert ShardingPlan.from_json(json.loads(text)) == plan
    validate(plan, task)


# Overrides of a training run

VALUES_ON_THE_COMMAND_LINE = (
    *map(str, ODD_NUMBERS),
    *("null", "true", "''", "abc", "'5'", "[]", "[1]", "[a,b]", "{}", "{a: 1}", "[null]", "???"),
    *("${seed}", "${nothing}", "[32,16]", "16", "0.25", "fp16", "nan", "../x", "x" * 3000),
)
SMALL = ["data.max_rows=100", "data.num_train_batches=2", "data.pregenerate=false", "batch_size=64"]


@functools.cache
def _keys() -> list[str]:
    """Return the keys of a run's config that have a value, without those of Hydra."""
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF_DIR)):
        cfg = OmegaConf.to_container(compose("train"), resolve=False)
    found: list[str] = []

    def collect(prefix: str, node: Any) -> None:
        if isinstance(node, dict) and node:
            for key, child in node.items():
                collect(f"{prefix}{key}.", child)
        else:
            found.append(prefix[:-1])

    collect("", cfg)
    return [key for key in found if "._" not in key]  # those are for Hydra


def overrides() -> Strategy:
    sharders = options_of("sharder")
    of_a_key = st.builds(
        lambda key, value: f"{key}={value}",
        st.sampled_from(_keys()),
        st.sampled_from(VALUES_ON_THE_COMMAND_LINE),
    )
    of_a_group = st.sampled_from(
        [
            *(f"sharder={name}" for name in sharders),
            *("model=dcnv2", "optimizer=adam", "optimizer=sgd", "topology=h100_80gb"),
            *("cost_model=none", "data=rm1", "data=criteo_kaggle", "data=nothing", "sharder"),
        ]
    )
    return st.lists(st.one_of(of_a_key, of_a_key, of_a_group), min_size=1, max_size=3)


def read_overrides(values: list[str], folder: Path) -> None:
    """Build everything that a run builds, and plan, without training."""
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF_DIR)):
        cfg = compose("train", [*SMALL, *values])
    settings = job_settings(cfg, ONE_RANK)
    planner = planner_factory(cfg).planner(RunContext("cpu", optimizer=cfg.optimizer.embedding))
    assert settings.dataset.batch_size == cfg.batch_size
    task = settings.task(settings.topology)
    batch = settings.dataset.batch("train", 0, rank=0, world_size=1)
    check_batch(batch, task.tables)
    settings.build_model(task, torch.device("cpu"))
    plan, report = planner.plan(task)
    _check_report(plan, report, task)


# Files of tasks and plans


def tasks() -> Strategy:
    return _text_of_json(TASK.to_json())


def read_task_file(data: bytes, folder: Path) -> None:
    path = folder / "task.json"
    path.write_bytes(data)
    task = read_task(path)
    if task.topology.world_size > 64:
        return
    plan, report = Planner(GreedySharder("size"), _cost_model()).plan(task)
    _check_report(plan, report, task)


def plans() -> Strategy:
    report = PlanReport("size", 0.1, cost=_cost_model().predict(PLAN, TASK), lower_bound_ms=0.01)
    return _text_of_json(plan_json(PLAN, report))


def read_plan_file(data: bytes, folder: Path) -> None:
    path = folder / "plan.json"
    path.write_bytes(data)
    plan, report = Planner(PlanFileSharder(path), _cost_model()).plan(TASK)
    _check_report(plan, report, TASK)
    areas = dict.fromkeys((table.name for table in TASK.tables), 0)
    for shard in plan.shards:
        areas[shard.table] += shard.num_rows * shard.num_cols
    for table in TASK.tables:
        assert areas[table.name] == table.num_embeddings * table.embedding_dim


# Criteo's files

GZIP = b"\x1f\x8b"
ODD_COLUMNS = (
    *(b"", b"0", b"1", b"2", b"-1", b"-0", b"+1", b"1.5", b" 1", b"1 ", b"nan", b"ffffffff"),
    *(b"100000000", b"2147483647", b"2147483648", b"-2147483649", b"g", b"\xff", b"\r", b'"'),
    *(b"0x1", b"\x00", b"9" * 400, b"\t", b"\n"),
)


@functools.cache
def _sample() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "train.txt"
        write_criteo_sample(path, num_rows=40)
        return path.read_bytes()


@st.composite
def _lines(draw: Callable[[Strategy], Any]) -> bytes:
    """Draw lines of the sample, in which some columns have other values."""
    columns = st.sampled_from(ODD_COLUMNS)
    lines = _sample().splitlines()[: draw(st.integers(1, 40))]
    for _ in range(draw(st.integers(0, 4))):
        number = draw(st.integers(0, len(lines) - 1))
        parts = lines[number].split(b"\t")
        parts[draw(st.integers(0, len(parts) - 1))] = draw(columns)
        lines[number] = b"\t".join(parts)
    return draw(st.sampled_from([b"\n", b"\r\n"])).join(lines)


def criteo_files() -> Strategy:
    text = st.one_of(_lines(), _lines(), damaged(_sample()), st.binary(max_size=50))
    packed = text.map(lambda data: gzip.compress(data, 1))
    return st.one_of(text, text, packed, packed.flatmap(damaged))


def read_criteo(data: bytes, folder: Path) -> None:
    path = folder / ("day_0.gz" if data.startswith(GZIP) else "day_0")
    path.write_bytes(data)
    schema = read_schema(OmegaConf.to_container(option_node("data/base", "criteo").schema))
    tally = RowTally(path, max_malformed_share=1.0)
    num_good = 0
    for rows, piece in read_good_rows(schema, schema.used_columns, tally):
        assert not rows.faults
        assert len(rows.labels) == len(piece.numbers) == len(piece.frame)
        assert set(rows.labels.tolist()) <= {0, 1}
        assert not any(np.isinf(values).any() for values in rows.dense.values())
        num_good += len(rows.labels)
    assert num_good + tally.num_malformed == tally.num_rows


# Artifacts


@functools.cache
def _artifact(kind: str) -> tuple[bytes, dict[str, Any], dict[str, Any]]:
    """Return the file, the arrays and the description of the package's artifact of a kind."""
    path = shipped(kind)
    with safe_open(path, framework="numpy") as file:
        meta = json.loads(file.metadata()[HEADER])
    fields = {key: value for key, value in meta.items() if key not in ("format", "sha256")}
    return path.read_bytes(), load_file(path), fields


@st.composite
def _changed_arrays(draw: Callable[[Strategy], Any], arrays: dict[str, Any]) -> dict[str, Any]:
    """Draw the arrays with some of them changed, whose checksum will be right."""
    changed = dict(arrays)
    for key in draw(st.lists(st.sampled_from(sorted(arrays)), min_size=1, max_size=3, unique=True)):
        array = changed.pop(key).copy()
        change = draw(st.sampled_from(["remove", "flat", "cut", "fill", "one", "type"]))
        number = draw(st.sampled_from([math.nan, math.inf, 1e30, -1e10, 1e6, 0.0]))
        if change == "fill":
            array[:] = number
        elif change == "one":
            array.flat[draw(st.integers(0, array.size - 1))] = number
        if change != "remove":
            forms = {"flat": array.ravel(), "cut": array[:-1], "type": array != 0}
            changed[key] = forms.get(change, array)
    return changed


@st.composite
def artifacts(draw: Callable[[Strategy], Any]) -> tuple[str, bytes | None, Any, Any]:
    """Draw a kind of artifact, and damaged bytes, or arrays with a description."""
    kind = draw(st.sampled_from(sorted(LOADERS)))
    data, arrays, fields = _artifact(kind)
    if draw(st.booleans()):
        return kind, draw(damaged(data)), None, None
    if draw(st.booleans()):
        fields = draw(changed_json(fields))
    else:
        arrays = draw(_changed_arrays(arrays))
    return kind, None, arrays, fields


def read_artifact_file(value: tuple[str, bytes | None, Any, Any], folder: Path) -> None:
    """Load the artifact; a cost model that loads has to predict finite times."""
    kind, data, arrays, fields = value
    path = folder / f"{kind}-x.safetensors"
    if data is None:
        write_artifact(folder, path.stem, arrays, fields)
    else:
        path.write_bytes(data)
    model: Any = LOADERS[kind](CPU, str(path))
    if hasattr(model, "predict"):
        cost = model.predict(PLAN, TASK)
        json.dumps(cost.to_json(), allow_nan=False)
    else:
        model.place(TASK, num_samples=2, seed=0)
