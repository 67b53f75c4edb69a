"""A run that is killed goes on, under another plan, with another number of ranks, or restarted."""

from pathlib import Path

import pytest

from dlrm_sharded.plans.plan import read_plan
from tests import preloaded
from tests.conftest import SMALL_RUN
from tests.e2e.own_datasets import KillsItselfOnce, settings_of
from tests.e2e.runs import LAUNCHERS, environment, result_of, train

OWN_DATASETS = Path(__file__).parent

SETTINGS = (
    *(*SMALL_RUN, "trainer.num_steps=24"),
    *("optimizer=sgd", "optimizer.embedding_learning_rate=0.01", "cost_model=none", "resume=auto"),
    *("trainer.checkpoint.every_steps=4", "trainer.checkpoint.background=false"),
    "data.pregenerate=false",
)


def test_a_killed_run_goes_on_under_another_plan(tmp_path):
    """Losses are equal up to the order of sums."""

    def run(name: str, *overrides: str, **options: int) -> str:
        folder = tmp_path / name
        manifests = "run/checkpoints/step-*/manifest.json"
        data = settings_of(KillsItselfOnce, folder=tmp_path, file=manifests)
        return train(folder, *SETTINGS, *data, *overrides, **options).stderr

    run("run", "sharder=dim", ranks=1, exit_code=1)
    before = read_plan(tmp_path / "run" / "plan.json")
    assert "resuming at step" in run("run", "sharder=random")
    after = read_plan(tmp_path / "run" / "plan.json")
    assert (before.world_size, after.world_size) == (1, 2)
    run("whole", "sharder=dim")
    resumed, whole = result_of(tmp_path / "run"), result_of(tmp_path / "whole")
    assert resumed["steps"] == whole["steps"] == 24
    assert resumed["loss"] == pytest.approx(whole["loss"], rel=1e-3)


def run_again(folder: Path, *overrides: str, exit_code: int = 0) -> preloaded.Ended:
    """Train in `folder`, where the runs go to the default place."""
    return preloaded.run(
        *(*LAUNCHERS["ours"], "2", "--max-restarts", "1", "-m", "dlrm_sharded.train"),
        *("sharder=dim", *SMALL_RUN, "data._target_=own_datasets.KillsRankZeroOnce"),
        *("data.pregenerate=false", *overrides),
        cwd=folder,
        exit_code=exit_code,
        env=environment() | {"PYTHONPATH": f"{environment()['PYTHONPATH']}:{OWN_DATASETS}"},
    )


@pytest.mark.slow
def test_a_restart_has_the_folder_of_its_first_start(tmp_path):
    done = run_again(tmp_path)
    assert "was killed by SIGKILL" in done.stderr
    assert "(restart 1)" in done.stderr
    (folder,) = (tmp_path / "runs").glob("*/dim")
    assert result_of(folder)["steps"] == 12

    refused = run_again(tmp_path, "batch_size=255", exit_code=2)
    assert "start again" not in refused.stderr
    assert refused.stderr.splitlines()[-1].endswith("must be a multiple of the 2 ranks")
    assert len(list((tmp_path / "runs").glob("*/dim"))) == 2
