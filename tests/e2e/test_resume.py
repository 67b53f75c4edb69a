"""A run that is killed goes on under another plan, with another number of ranks."""

from pathlib import Path

import pytest

from dlrm_sharded.plans.plan import read_plan
from tests.conftest import SMALL_RUN
from tests.e2e.runs import result_of, train

SETTINGS = (
    *(*SMALL_RUN, "trainer.num_steps=24"),
    *("optimizer=sgd", "optimizer.embedding_learning_rate=0.01", "cost_model=none", "resume=auto"),
    *("trainer.checkpoint.every_steps=4", "trainer.checkpoint.background=false"),
    *("data._target_=own_datasets.KillsItselfOnce", "data.pregenerate=false"),
)


def test_a_killed_run_goes_on_under_another_plan(tmp_path):
    """Losses are equal up to the order of sums."""

    def run(name: str, *overrides: str, **options: int) -> str:
        folder = tmp_path / name
        settings = (*SETTINGS, f"+data.folder={tmp_path}", *overrides)
        return train(folder, *settings, python_path=Path(__file__).parent, **options).stderr

    run("run", "sharder=dim", ranks=1, exit_code=1)
    before = read_plan(tmp_path / "run" / "plan.json")
    assert "resuming at step" in run("run", "sharder=random")
    after = read_plan(tmp_path / "run" / "plan.json")
    assert (before.world_size, after.world_size) == (1, 2)
    run("whole", "sharder=dim")
    resumed, whole = result_of(tmp_path / "run"), result_of(tmp_path / "whole")
    assert resumed["steps"] == whole["steps"] == 24
    assert resumed["loss"] == pytest.approx(whole["loss"], rel=1e-3)
