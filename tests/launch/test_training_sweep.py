"""Sweeps of real training runs, and what they leave behind."""

import csv
import json
from pathlib import Path

import pytest

from dlrm_sharded.cost.cost_model_file import costs_digest, read_cost_model
from dlrm_sharded.plans.plan import read_plan
from dlrm_sharded.plans.task import read_task
from dlrm_sharded.plans.validation import validate
from tests import preloaded
from tests.conftest import SMALL_RUN
from tests.e2e.runs import events_of, result_of
from tests.launch.conftest import jobs_of, states_of

RUNS = ["random_0", "size_lookup_1", "random_2", "size_lookup_3"]


def run_sweep(sweep_dir: Path, *overrides: str, exit_code: int = 0) -> preloaded.Ended:
    """A sweep of small runs."""
    command = ["-m", "dlrm_sharded.train", "-m", f"hydra.sweep.dir={sweep_dir}"]
    return preloaded.run(*command, *SMALL_RUN, *overrides, exit_code=exit_code)


def test_every_job_is_a_run(finished_sweep):
    jobs = jobs_of(finished_sweep)
    assert [job["folder"] for job in jobs] == RUNS
    assert [job["state"] for job in jobs] == ["succeeded"] * 4
    assert len({job["app"] for job in jobs}) == 4
    for job in jobs:
        folder = finished_sweep / job["folder"]
        result = result_of(folder)
        assert result["sharder"] == job["choices"]["sharder"]
        assert f"seed={result['seed']}" in job["overrides"]
        assert result["world_size"] == 2
        validate(read_plan(folder / "plan.json"), read_task(folder / "task.json"))
        log = (finished_sweep / job["log"]).read_text()
        assert "embedding cost" in log
        assert "Warning" not in log
        assert (folder / "train.log").exists()
        # Rank 1 writes nothing, and rank 0 what a single run writes.
        assert len(list(folder.glob("events.out.tfevents.*"))) == 1


def test_all_jobs_plan_by_the_same_cost_model(finished_sweep):
    """Though each of them adds a line to the journal that corrects the cost model."""
    plans = [json.loads((finished_sweep / run / "plan.json").read_text()) for run in RUNS]
    [digest] = {plan["made_from"]["prices_digest"] for plan in plans}
    assert {result_of(finished_sweep / run)["prices_digest"] for run in RUNS} == {digest}
    [snapshot] = (finished_sweep / "prices").glob("*.safetensors")
    assert costs_digest(read_cost_model(snapshot)) == digest
    assert costs_digest(read_cost_model(finished_sweep / RUNS[-1] / "prices.safetensors")) == digest


def test_the_objective_reaches_the_driver(finished_sweep):
    said = (finished_sweep / "output.txt").read_text()
    for i, run in enumerate(RUNS):
        throughput = result_of(finished_sweep / run)["samples_per_s"]
        line = next(line for line in said.splitlines() if f"#{i} " in line and "succeeded" in line)
        assert line.endswith(f"after its submission: samples_per_s {throughput:,.6g}")


def test_comparison(finished_sweep):
    said = (finished_sweep / "output.txt").read_text()
    text = (finished_sweep / "summary.md").read_text()
    with (finished_sweep / "summary.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["sharder"] for row in rows] == ["random", "size_lookup"]
    for row, runs in zip(rows, (RUNS[0::2], RUNS[1::2]), strict=True):
        costs = [result_of(finished_sweep / run)["embedding_cost_ms"] for run in runs]
        mean = sum(map(float, costs)) / 2
        assert float(row["embedding_cost_ms_mean"]) == pytest.approx(mean)
        assert (row["runs"], row["succeeded"]) == ("2", "2")
        for place in (said, text):
            assert row["sharder"] in place
            assert f"{mean:,.2f}" in place


def test_figures_of_a_run_stand_at_both_ends(finished_sweep):
    """A chart of one point a run hides the best and the worst."""
    folder = finished_sweep / RUNS[0]
    events = events_of(folder)
    result = result_of(folder)
    for tag, key in (
        ("embedding/cost_ms", "embedding_cost_ms"),
        ("train/samples_per_s/median", "samples_per_s"),
        ("memory/peak_gib/max", "peak_gib"),
    ):
        points = events.Scalars(tag)
        assert [point.step for point in points] == [0, result["steps"]]
        assert [point.value for point in points] == pytest.approx([result[key]] * 2, rel=1e-5)


@pytest.mark.slow
def test_failures(tmp_path):
    """A bad value fails its own job."""
    done = run_sweep(tmp_path, "sharder=dim", "trainer.num_epochs=1,0", exit_code=1)
    assert states_of(tmp_path) == ["succeeded", "failed"]
    reason = "trainer.num_epochs is 0; it must be an integer >= 1"
    assert jobs_of(tmp_path)[1]["reason"] == reason
    assert "1 of 2 jobs did not succeed" in done.stderr
    assert f"#1 trainer.num_epochs=0: failed: {reason}" in done.stderr
    assert str(tmp_path / "dim_1" / "job.log") in done.stderr
    assert "Traceback" not in done.stderr
    assert f"dim_1: failed: {reason}" in (tmp_path / "summary.md").read_text()


@pytest.mark.slow
def test_an_unknown_objective(tmp_path):
    run_sweep(tmp_path, "sharder=dim", "objective=speed", exit_code=1)
    (reason,) = (job["reason"] for job in jobs_of(tmp_path))
    assert reason.startswith("objective is 'speed'; known: ")
    assert {"samples_per_s", "embedding_cost_ms"} <= set(reason.split("known: ")[1].split(", "))


@pytest.mark.slow
def test_optuna_finds_the_better_one(tmp_path):
    """A maintained sweeper with TorchX: it asks in batches, and optimizes the objective."""
    run_sweep(
        tmp_path,
        *("hydra/sweeper=optuna", "hydra.sweeper.n_trials=2"),
        *("hydra.sweeper.n_jobs=1", "hydra.sweeper.direction=minimize"),
        *("hydra.sweeper.sampler.seed=1", "objective=loss"),
        "optimizer.embedding_learning_rate=choice(0.0001,1.0)",
    )
    assert states_of(tmp_path) == ["succeeded"] * 2
    losses = [float(result_of(path)["loss"]) for path in tmp_path.glob("search_*")]
    assert len(losses) == 2
    best = (tmp_path / "optimization_results.yaml").read_text()
    assert f"best_value: {min(losses)}" in best
