"""A run folder that release 0.2 has written: `resume=auto` goes on in it.

tests/fixtures/0.2 was written by commit 74764e8f on 2 CPU ranks. `losses.json` has the losses of
that run, which the same commit resumed at step 4.
"""

import json
import shutil
from pathlib import Path

import pytest

from tests import preloaded
from tests.e2e.runs import command, environment, events_of, result_of

FOLDER = Path(__file__).parents[1] / "fixtures" / "0.2"
RUN = [
    *("batch_size=128", "trainer.num_steps=8", "trainer.log_every_steps=1"),
    *("trainer.checkpoint.every_steps=4", "data.max_rows=16", "data.num_train_batches=8"),
    *("data.num_val_batches=2", "measure.iterations=4", "measure.warmup=1"),
    *("model.dense_layers=[8,8]", "model.over_layers=[8,1]", "journal=auto", "resume=auto"),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the run, beside the cache that 0.2 has left."""
    shutil.copytree(FOLDER / "cache", tmp_path / "cache")
    return shutil.copytree(FOLDER / "run", tmp_path / "run")


def resume(folder: Path, *overrides: str, exit_code: int = 0) -> str:
    env = environment() | {"DLRM_SHARDED_CACHE": str(folder.parent / "cache")}
    arguments = [*command(2, "ours"), f"hydra.run.dir={folder}", *RUN, *overrides]
    return preloaded.run(*arguments, env=env, exit_code=exit_code).stderr


def shards_of(folder: Path) -> list[dict[str, object]]:
    return json.loads((folder / "plan.json").read_text())["shards"]


def test_a_plain_run_goes_on(folder: Path) -> None:
    output = resume(folder)
    assert "the run keeps the plan of its checkpoint" in output
    assert "resuming at step 4" in output
    assert "was trained with another config" not in output
    assert shards_of(folder) == shards_of(FOLDER / "run")
    result = result_of(folder)
    assert (result["steps"], result["interruptions"]) == (8, 1)
    losses = {event.step: event.value for event in events_of(folder).Scalars("train/loss")}
    expected = json.loads((FOLDER / "losses.json").read_text())
    assert losses == pytest.approx({int(step): loss for step, loss in expected.items()}, rel=1e-4)
    checkpoints = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert checkpoints == ["step-0000000004", "step-0000000008"]


@pytest.mark.slow
def test_another_sharder_takes_its_weights_along(folder: Path) -> None:
    output = resume(folder, "sharder=dim")
    assert "the plan of its checkpoint" not in output
    assert shards_of(folder) != shards_of(FOLDER / "run")
    assert result_of(folder)["sharder"] == "dim"
