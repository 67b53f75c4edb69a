"""Pipelines by choice, from the config of a run to its steps."""

import json

import pytest

from tests.conftest import SMALL_RUN
from tests.e2e.runs import keep_probe, result_of, train_alone

pytestmark = pytest.mark.slow


def test_auto_takes_what_earlier_runs_have_shown_to_be_faster(tmp_path):
    """A journal says it of two pipelines, whether ranks here exchange beside computation or not."""
    keep_probe()
    settings = (*SMALL_RUN, "sharder=dim", f"journal={tmp_path / 'journal'}")
    train_alone(tmp_path / "base", *settings)
    [plans] = (tmp_path / "journal").glob("*.jsonl")
    conditions = {"format": 1, "optimizer": "rowwise_adagrad", "ranks_per_host": 1}
    lines = [
        conditions
        | {"pipeline": "+".join(beside) or "serial", "composed_ms": 9.0, "measured_ms": ms}
        for exchanges in ([], ["exchanges"])
        for beside, ms in ((exchanges, 18.0), ([*exchanges, "sparse_dist_lite"], 9.0))
    ]
    steps = plans.parent / "steps" / plans.name
    steps.parent.mkdir(exist_ok=True)
    steps.write_text("".join(f"{json.dumps(line)}\n" for line in 9 * lines))
    done = train_alone(tmp_path / "auto", *settings)
    assert "trainer.pipeline=auto is sparse_dist_lite: by earlier runs here" in done.stderr
    assert result_of(tmp_path / "auto")["loss"] == result_of(tmp_path / "base")["loss"]


def test_a_run_with_a_dense_graph_trains_as_without(tmp_path):
    """Its plan is priced, its parts measured, and its steps traced and saved as ever."""
    settings = (*SMALL_RUN, "sharder=dim", "trainer.trace=true", "trainer.checkpoint.every_steps=5")
    train_alone(tmp_path / "without", *settings)
    train_alone(tmp_path / "with", *settings, "model.dense_graph=true")
    losses = [result_of(tmp_path / name)["loss"] for name in ("with", "without")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert (tmp_path / "with" / "trace" / "rank0.json.gz").exists()


def test_a_pipeline_that_needs_a_gpu_is_refused_before_a_plan_is_written(tmp_path):
    settings = (*SMALL_RUN, "sharder=dim", "trainer.pipeline=semi_sync")
    refused = train_alone(tmp_path / "p", *settings, exit_code=2)
    assert "trainer.pipeline=semi_sync needs the streams of a GPU" in refused.stderr
    assert not (tmp_path / "p" / "plan.json").exists()
