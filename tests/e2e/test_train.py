"""Runs as a user starts them: torchrun, two gloo ranks, and what they leave behind."""

import dataclasses
import json
import math

import pytest

from dlrm_sharded.calibration.priors import learned_cost_model
from dlrm_sharded.cost.bound import lower_bound_ms
from dlrm_sharded.files.json_files import write_json
from dlrm_sharded.files.provenance import fbgemm_version, versions
from dlrm_sharded.hardware.context import RunContext
from dlrm_sharded.plans.layouts import Replicas
from dlrm_sharded.plans.plan import Shard, ShardingPlan, read_plan
from dlrm_sharded.plans.plan_cost import STAGES, PlanCost
from dlrm_sharded.plans.task import read_task
from dlrm_sharded.plans.validation import validate
from dlrm_sharded.runs.result import RunResult
from tests.conftest import SMALL_RUN
from tests.e2e.runs import events_of, result_of, train, train_alone
from tests.unit.datasets.mlperf_files import IDS, write_days
from tests.unit.runs.test_run_events import SCALARS as SCALARS_OF_A_PLAN

SCALARS = {
    *SCALARS_OF_A_PLAN,
    *("train/samples_per_s", "train/step_ms", "train/data_wait_ms", "train/loss"),
    *("eval/auroc", "eval/normalized_entropy", "memory/peak_gib/max"),
}
RESULT_KEYS = {key.name for key in dataclasses.fields(RunResult)}


def test_result_json(run_dir):
    result = result_of(run_dir)
    assert set(result) == RESULT_KEYS
    assert result["sharder"] == "search"
    assert result["world_size"] == 2
    assert result["steps"] == 12
    assert result["seed"] == 3
    for key in ("embedding_cost_ms", "critical_path_ms", "samples_per_s", "step_ms", "loss"):
        assert isinstance(result[key], float)
        assert 0 < result[key] < math.inf
    assert set(result["stages_ms"]) == set(STAGES)  # type: ignore[call-overload]


def test_the_cost_is_predicted(run_dir, artifact):
    """By the named model, of the plan and task that the run leaves behind."""
    plan, task = read_plan(run_dir / "plan.json"), read_task(run_dir / "task.json")
    context = RunContext("cpu", optimizer="rowwise_adagrad", fbgemm=fbgemm_version(versions()))
    model = learned_cost_model(context, str(artifact))
    predicted = model.predict(plan, task)
    written = json.loads((run_dir / "plan.json").read_text())
    assert PlanCost.from_json(written["predicted"]) == PlanCost(predicted.per_rank)
    result = result_of(run_dir)
    assert result["predicted_ms"] == predicted.cost_ms
    assert result["predicted_critical_path_ms"] == predicted.critical_path_ms
    stages_ms = {stage: predicted.stage_max_ms(stage) for stage in STAGES}
    assert result["predicted_stages_ms"] == stages_ms
    assert result["predicted_input_dist_ms"] == predicted.input_dist_max_ms
    bound_ms = lower_bound_ms(model.cost_task(task))
    assert result["lower_bound_ms"] == written["lower_bound_ms"] == bound_ms
    assert result["gap"] == written["gap"] == predicted.cost_ms / bound_ms - 1
    events = events_of(run_dir)
    shown = {tag: events.Scalars(f"plan/{tag}")[0].value for tag in ("predicted_ms", "gap")}
    expected = {"predicted_ms": predicted.cost_ms, "gap": written["gap"]}
    assert shown == pytest.approx(expected, rel=1e-5)
    (explained,) = events.Tensors("plan/explained/text_summary")
    text = explained.tensor_proto.string_val[0].decode()
    assert f"slowest rank's {predicted.cost_ms:.2f} ms" in text
    assert "one more rank" not in text, "nobody asked for it"


@pytest.mark.slow
def test_runs_without_a_cost_model(run_dir, tmp_path):
    """Nothing is predicted, and nothing else changes: here, some tables are replicated."""
    tables = read_task(run_dir / "task.json").tables
    shards = [Shard.whole(table, i % 2) for i, table in enumerate(tables[4:])]
    shards += [replica for table in tables[:4] for replica in Replicas(2).shards(table)]
    write_json(tmp_path / "given.json", ShardingPlan(2, tuple(shards)).to_json())
    plan = ["sharder=plan_file", f"sharder.path={tmp_path / 'given.json'}"]
    done = train(tmp_path, *SMALL_RUN, *plan, "cost_model=none")
    assert "predicted" not in done.stderr
    assert "UserWarning" not in done.stderr
    assert min(result_of(tmp_path)["stages_ms"].values()) > 0
    assert sum(shard.replicated for shard in read_plan(tmp_path / "plan.json").shards) == 8
    result = result_of(tmp_path)
    assert set(result) == RESULT_KEYS
    about = ("predicted", "lower_bound_ms", "gap")
    predicted = {key: value for key, value in result.items() if key.startswith(about)}
    assert len(predicted) == 6
    assert set(predicted.values()) == {None}
    assert json.loads((tmp_path / "plan.json").read_text())["predicted"] is None


def test_plan_json(run_dir):
    task = read_task(run_dir / "task.json")
    validate(read_plan(run_dir / "plan.json"), task)
    assert all(table.reuse_histogram is not None for table in task.tables)
    assert task.topology.optimizer_bytes_per_row == 4
    assert task.optimizer == "rowwise_adagrad"


def test_event_file(run_dir):
    events = events_of(run_dir)
    tags = events.Tags()
    assert set(tags["scalars"]) >= SCALARS
    assert set(tags["images"]) == {"plan/cost_by_rank", "plan/memory_by_rank"}
    assert {"plan/explained/text_summary", "config/text_summary"} <= set(tags["tensors"])
    assert [event.step for event in events.Scalars("train/loss")] == [4, 8, 12]
    result = result_of(run_dir)
    cost_ms = events.Scalars("embedding/cost_ms")[0].value
    assert cost_ms == pytest.approx(result["embedding_cost_ms"], rel=1e-5)
    assert events.summary_metadata["_hparams_/session_start_info"].plugin_data.plugin_name


def test_only_rank_zero_writes(run_dir):
    names = {path.name.split(".tfevents")[0] for path in run_dir.iterdir()}
    assert {name for name in names if not name.startswith(".owner")} == {
        *(".hydra", "checkpoints", "events.out", "prices.safetensors", "train.log"),
        *(f"{name}.json" for name in ("memory", "plan", "result", "run", "task")),
    }


@pytest.mark.slow
def test_learns_from_criteo_files(tmp_path):
    """From a TSV to an AUROC that chance does not give; rank 0 writes and converts it."""
    data = ("data=criteo_sample", f"data.path={tmp_path / 'log'}", "data.num_rows=30_000")
    size = ("batch_size=512", "data.embedding_dim=8", "data.seed=1")
    done = train(tmp_path / "run", *data, *size)
    assert done.stderr.count("generating 30,000 samples in Criteo's format") == 1
    assert done.stderr.count("samples for training") == 1
    assert result_of(tmp_path / "run")["auroc"] > 0.6


@pytest.mark.slow
def test_one_rank_alone(tmp_path):
    """Without torchrun: one rank, and the exit code is ours."""
    bad = train_alone(tmp_path, "batch_size=0", exit_code=2)
    assert "batch_size is 0" in bad.stderr
    train_alone(tmp_path, *SMALL_RUN, "explain=true")
    assert result_of(tmp_path)["world_size"] == 1
    (explained,) = events_of(tmp_path).Tensors("plan/explained/text_summary")
    assert "- one more rank: " in explained.tensor_proto.string_val[0].decode(), "it is asked for"


def test_log_lines_are_said_once(run_dir):
    """Details are in train.log only."""
    lines = (run_dir / "train.log").read_text().splitlines()
    found = [line[11:] for line in lines if line.startswith("[")]
    assert len(found) == len({*found})


def test_memory_is_estimated_before_training(run_dir):
    """For each rank, and next to what was used; the estimate of a small run is mostly measured."""
    ranks = json.loads((run_dir / "memory.json").read_text())["ranks"]
    assert len(ranks) == 2
    for rank in ranks:
        assert rank["total_bytes"] == sum(v for k, v in rank.items() if k != "total_bytes")
    result = result_of(run_dir)
    assert result["estimated_peak_gib"] == max(rank["total_bytes"] for rank in ranks) / 2**30
    assert result["estimated_peak_gib"] == pytest.approx(result["peak_gib"], rel=0.25)


@pytest.mark.slow
def test_a_dry_run_plans_a_model_that_no_host_holds(tmp_path):
    """MLPerf's 98 GB: planned, its memory listed, and built without memory; nothing is trained."""
    done = train_alone(
        tmp_path / "run",
        *("experiment=mlperf_dcnv2", "dry_run=true", "topology.memory_gib=256", "batch_size=1024"),
    )
    assert "memory that rank 0 needs" in done.stderr
    assert "97.42 GiB of parameters" in done.stderr
    assert len(read_plan(tmp_path / "run/plan.json").shards) >= 26
    task = read_task(tmp_path / "run/task.json")
    assert (task.batch_size, task.optimizer) == (1024, "elementwise_adagrad")
    (rank,) = json.loads((tmp_path / "run/memory.json").read_text())["ranks"]
    assert rank["table_weights_bytes"] == rank["table_optimizer_bytes"] > 97 * 2**30
    assert rank["process_bytes"] < 2 * 2**30
    assert not (tmp_path / "run/result.json").exists()


def test_mlperfs_model_on_mlperfs_data(tmp_path):
    """The files that MLPerf's reference makes, with its experiment cut down to a laptop."""
    write_days(tmp_path / "files", rows=(300, 230, 250))
    train(
        tmp_path / "run",
        *("experiment=mlperf_dcnv2", "data=criteo_1tb_multihot", "data.days=3", "sharder=dim"),
        *(f"data.path={tmp_path / 'files'}", "data.max_rows=50", "data.embedding_dim=8"),
        *("model.dense_layers=[16,8]", "model.over_layers=[16,1]", "model.cross_rank=4"),
        *("batch_size=64", "trainer.num_epochs=2", "measure.iterations=2", "data.bounds=error"),
    )
    result = result_of(tmp_path / "run")
    assert (result["steps"], result["world_size"]) == (2 * (530 // 64), 2)
    assert 0 < result["loss"] < 1
    assert {t.pooling_factor for t in read_task(tmp_path / "run/task.json").tables} == {*IDS}
