"""Files that release 0.2 has written are read, or refused in one line that says what to do.

tests/fixtures/0.2 was written by commit 74764e8f; tests/e2e/test_from_02.py resumes its run.
"""

import json
from pathlib import Path

import pytest
from hydra.utils import get_object

from dlrm_sharded.calibration.costs_file import read_costs
from dlrm_sharded.calibration.priors import learned_cost_model
from dlrm_sharded.calibration.sample_fit import fit_samples
from dlrm_sharded.calibration.sample_store import Conditions, SampleStore
from dlrm_sharded.checkpoint.manifest import read_manifest
from dlrm_sharded.cost.cost_model_file import cost_model_beside, read_cost_model
from dlrm_sharded.files.errors import ConfigError, InvalidPlanError
from dlrm_sharded.files.renamed import RENAMED
from dlrm_sharded.hardware.context import RunContext
from dlrm_sharded.plans.plan import ShardingPlan, read_plan
from dlrm_sharded.plans.task import read_task
from dlrm_sharded.plans.validation import validate
from dlrm_sharded.runs.result import read_result
from tests import preloaded

FOLDER = Path(__file__).parents[1] / "fixtures" / "0.2"
RUN, PLANS, CALIBRATION = FOLDER / "run", FOLDER / "plans", FOLDER / "calibration"
[JOURNAL] = FOLDER.glob("cache/runs/*.jsonl")
[ARTIFACT] = CALIBRATION.glob("*.safetensors")


def test_the_files_are_small_and_say_nothing_of_a_machine() -> None:
    files = [path for path in FOLDER.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 400_000
    for path in files:
        for word in (b"/work", b"/tmp", b"/home", b"/root"):
            assert word not in path.read_bytes(), path


@pytest.mark.parametrize(
    ("plan", "task"),
    [
        ("plans/bags.plan", "plans/bags.task"),
        ("plans/half.plan", "plans/half.task"),
        ("plans/whole.plan", "plans/whole.task"),
        ("run/plan", "run/task"),
    ],
)
def test_plans_and_tasks_are_read_as_they_were_written(plan: str, task: str) -> None:
    path = FOLDER / f"{plan}.json"
    written = json.loads(path.read_text())
    read = read_plan(path)
    of_plan = ("world_size", "shards", "exchange_precision")
    assert read.to_json() == {key: written[key] for key in of_plan if key in written}
    validate(read, read_task(FOLDER / f"{task}.json"))


def test_a_plan_with_deduplicated_ids_is_one_without(caplog: pytest.LogCaptureFixture) -> None:
    read = read_plan(PLANS / "dedup.plan.json")
    assert "unknown keys, which have no effect: ['dedup']" in caplog.text
    validate(read, read_task(PLANS / "sequences.task.json"))


def test_column_shards_of_sequences_are_refused() -> None:
    read = read_plan(PLANS / "columns.plan.json")
    with pytest.raises(InvalidPlanError, match=r"in column shards.*whole or in row blocks"):
        validate(read, read_task(PLANS / "sequences.task.json"))


def test_a_plan_with_cached_tables_and_its_task_are_refused() -> None:
    with pytest.raises(InvalidPlanError, match="unknown field `load_factor`"):
        read_plan(PLANS / "cached.plan.json")
    with pytest.raises(ConfigError, match="unknown field `miss_ratio_curve`"):
        read_task(PLANS / "cached.task.json")


def test_a_plan_is_made_again(tmp_path: Path) -> None:
    """Options that 0.2 wrote down and 0.3 does not have are left out."""
    again = (f"again={PLANS / 'bags.plan.json'}", f"task={PLANS / 'bags.task.json'}")
    module = "dlrm_sharded.commands.plan"
    output = preloaded.run("-m", module, *again, cwd=tmp_path, exit_code=0).output
    assert "the plan, its predicted cost and its bound equal those of" in output


@pytest.mark.parametrize("folder", ["run/plan", "plans/bags.plan"])
def test_cost_models_beside_a_plan_predict_what_they_did(folder: str) -> None:
    path = FOLDER / f"{folder}.json"
    task = read_task(path.with_name(path.name.replace("plan", "task")))
    predicted = read_cost_model(cost_model_beside(path)).predict(read_plan(path), task)
    written = json.loads(path.read_text())["predicted"]
    assert predicted.cost_ms == pytest.approx(written["max_ms"], rel=1e-12)


def test_the_checkpoint_has_the_plan_of_its_run() -> None:
    state = read_manifest(RUN / "checkpoints" / "step-0000000004").state
    assert ShardingPlan.from_json(state.plan) == read_plan(RUN / "plan.json")


def test_a_result_is_read() -> None:
    written = json.loads((RUN / "result.json").read_text())
    result = read_result(RUN)
    assert result is not None
    for key in ("embedding_cost_ms", "predicted_ms", "loss", "auroc", "steps", "versions"):
        assert getattr(result, key) == written[key]


def test_the_run_is_reported_under_the_name_of_its_release(tmp_path: Path) -> None:
    module, out = "dlrm_sharded.commands.report", tmp_path / "out"
    preloaded.run("-m", module, str(RUN), f"out={out}", cwd=tmp_path, exit_code=0)
    assert "search (0.2)" in (out / "summary.md").read_text()


def test_a_calibrated_model_and_its_measurements() -> None:
    samples, context = read_costs(CALIBRATION / "costs.parquet")
    assert len(samples) == 34
    model = learned_cost_model(RunContext("cpu"), str(ARTIFACT))
    assert model.name == context.hardware.name
    assert fit_samples(model, samples).error < 0.5


@pytest.mark.parametrize("target", RENAMED.values())
def test_what_is_renamed_is_there(target: str) -> None:
    assert callable(get_object(target))
    assert target not in RENAMED, "runs of today are not taken for those of 0.2"


def test_measured_runs_of_the_cache() -> None:
    conditions = Conditions("rowwise_adagrad", 2, "1.8.0", 1)
    [run] = SampleStore(JOURNAL).read(conditions).values()
    assert run.batch_size == 128
