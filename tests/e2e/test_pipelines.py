"""Pipelines and traces by choice, from the config of a run to its steps."""

import pytest

from tests.conftest import SMALL_RUN
from tests.distributed.test_profiler import NUM_TRACED, check_traces
from tests.e2e.runs import events_of, result_of, train, train_alone

pytestmark = pytest.mark.slow


def test_a_run_with_a_dense_graph_trains_as_without(tmp_path):
    """Its steps are traced and saved as ever."""
    settings = (*SMALL_RUN, "sharder=dim", "trainer.trace=true", "trainer.checkpoint.every_steps=5")
    train_alone(tmp_path / "without", *settings)
    train_alone(tmp_path / "with", *settings, "model.dense_graph=true")
    losses = [result_of(tmp_path / name)["loss"] for name in ("with", "without")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert (tmp_path / "with" / "trace" / "rank0.json.gz").exists()


def test_a_traced_run(tmp_path):
    train(
        tmp_path,
        *(*SMALL_RUN, "trainer.num_steps=9", "trainer.num_warmup_steps=3", "trainer.trace=true"),
        *(f"trainer.trace_steps={NUM_TRACED}", "measure.iterations=3", "measure.warmup=1"),
    )
    check_traces(tmp_path / "trace", 2)
    shown = events_of(tmp_path)
    # 3 steps warm up, the profiler starts in the next one, and 2 are traced
    assert [event.step for event in shown.Scalars("train/loss")] == [3, 4, 6, 8, 9]
    assert [event.step for event in shown.Scalars("train/step_ms")] == [3, 8, 9]
    assert result_of(tmp_path)["samples_per_s"] is not None
