"""The best evaluation: its checkpoint is kept, and a training ends that does not get better."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from dlrm_sharded.checkpoint.folder import checkpoints
from dlrm_sharded.checkpoint.manifest import read_manifest
from dlrm_sharded.checkpoint.saver import CheckpointConfig
from dlrm_sharded.files.errors import ConfigError
from dlrm_sharded.ranks.distributed import Rank
from dlrm_sharded.training import steady_steps
from dlrm_sharded.training import steps as steps_module
from dlrm_sharded.training.best import Best
from dlrm_sharded.training.metrics import Evaluation
from dlrm_sharded.training.progress import Progress, read_progress
from dlrm_sharded.training.trainer_config import TrainerConfig
from dlrm_sharded.training.training_result import TrainingResult
from tests.unit.checkpoint.cases import STATE, checkpoints_of_run, steps_in
from tests.unit.training.conftest import BATCH_SIZE, Events, Train

RARE = CheckpointConfig(every_steps=1000)


def with_auroc(value: float | None) -> Evaluation:
    return Evaluation(value, 0.5, num_samples=8, loss=0.25)


@pytest.mark.parametrize(
    ("metric", "values", "best"),
    [
        ("auroc", [0.5, 0.75, 0.75, 0.5], (0.75, 2, 2)),
        ("auroc", [None, None], (None, None, 2)),
        ("auroc", [None, 0.5, None], (0.5, 2, 1)),
        ("normalized_entropy", [0.5, 0.75, 0.25], (0.25, 3, 0)),
        ("loss", [0.5, 0.25, 0.75], (0.25, 2, 1)),
    ],
)
def test_better_and_worse_values(metric, values, best):
    found = Best(metric)
    for step, value in enumerate(values, start=1):
        other = {"auroc": 0.0, "normalized_entropy": 0.0, "num_samples": 8, "loss": 0.0}
        found = found.after(Evaluation(**other | {metric: value}), step)
    assert found == Best(metric, *best)


@pytest.fixture
def go_on(train: Train, rank: Rank, tmp_path: Path, monkeypatch: Any) -> Callable[..., Any]:
    """Trains from the newest checkpoint with evaluations after every step, of these AUROCs."""

    def run(aurocs: list[float | None], **config: Any) -> tuple[TrainingResult, list[int]]:
        evaluate = Mock(side_effect=[*map(with_auroc, aurocs)])
        monkeypatch.setattr(steps_module, "evaluate", evaluate)
        start = Progress()
        if found := checkpoints(tmp_path):
            start = read_progress(read_manifest(found[0]), rank, same_plan=True)
        saves = checkpoints_of_run(
            tmp_path, rank, STATE, in_background=False, every_steps=1000, keep=1
        )
        config = {"num_steps": start.step + len(aurocs)} | config
        options = {"eval_every_steps": 1, "num_val_batches": 1, "checkpoint": RARE} | config
        result = train(events := Events(), start=start, checkpoints=saves, **options)
        assert evaluate.call_count == len(aurocs)
        return result, [event for event in events.seen if isinstance(event, int)]

    return run


def test_the_best_checkpoint_is_kept_across_a_restart(go_on, tmp_path):
    """It is the one of its step, whatever was written since."""
    result, _ = go_on([0.5, 0.75, 0.625, None], keep_best="auroc")
    assert steps_in(tmp_path) == [4, 2]
    assert result.best == Best("auroc", 0.75, step=2, num_worse=2)
    assert result.evaluation == with_auroc(None)
    assert [read_manifest(p).state.best_step for p in checkpoints(tmp_path)] == [2, 2]
    result, _ = go_on([0.625, 0.625], keep_best="auroc")
    assert steps_in(tmp_path) == [6, 2]
    result, _ = go_on([0.625, 0.875, 0.5], keep_best="auroc")
    assert steps_in(tmp_path) == [9, 8]
    assert result.best == Best("auroc", 0.875, step=8, num_worse=1)
    result, _ = go_on([0.25], keep_best="loss")  # by another metric, the first one is the best
    assert steps_in(tmp_path) == [10]
    assert result.best == Best("loss", 0.25, step=10)


def test_nothing_is_kept_or_noted_without_being_asked_for(go_on, tmp_path):
    result, steps = go_on([0.75, 0.5, 0.5])
    assert steps_in(tmp_path) == [3]
    assert (result.best, steps) == (None, [1, 2, 3])
    assert read_manifest(checkpoints(tmp_path)[0]).state.progress["best"] is None


def test_patience_ends_a_training_that_does_not_get_better(go_on, tmp_path, caplog):
    """As if it had no more steps; it goes on only with more patience."""
    caplog.set_level("INFO")
    result, steps = go_on([0.5, 0.5], patience=3, num_steps=2)
    assert (result.num_steps, steps) == (2, [1, 2])
    result, steps = go_on([0.25, None], patience=3, num_steps=9)
    assert (result.num_steps, steps) == (4, [1, 2])
    assert steps_in(tmp_path) == [4]
    text = "after step 4: trainer.patience=3 evaluations in a row were not better; best auroc 0.5"
    assert [text in message for message in caplog.messages].count(True) == 1
    result, steps = go_on([], patience=3, num_steps=9)
    assert (result.num_steps, steps, result.evaluation) == (4, [], with_auroc(None))
    result, steps = go_on([0.25], patience=4, num_steps=9)
    assert (result.num_steps, steps) == (5, [1])
    assert "checkpoint at step 5 written" in caplog.text


def test_a_missed_evaluation_that_is_done_later_counts(train, rank, tmp_path, monkeypatch):
    """A signal has interrupted it. It may be the best one, or the one at which patience ends."""
    for best, kept, num_steps in (
        (Best("auroc", 0.5, step=2), [4, 3], 4),
        (Best("auroc", 0.9, step=2), [3], 3),
    ):
        folder = tmp_path / str(num_steps)
        evaluate = Mock(side_effect=[with_auroc(0.75), with_auroc(0.5)])
        monkeypatch.setattr(steps_module, "evaluate", evaluate)
        saves = checkpoints_of_run(folder, rank, STATE, in_background=False, every_steps=9, keep=1)
        result = train(
            Events(),
            start=Progress(step=3, evaluated_step=2, best=best),
            checkpoints=saves,
            num_steps=4,
            num_val_batches=1,
            **{"eval_every_steps": 1, "checkpoint": RARE, "keep_best": "auroc", "patience": 1},
        )
        assert steps_in(folder) == kept
        assert result.num_steps == num_steps


def test_throughput_of_a_training_that_ends_early(train, monkeypatch):
    """It is that of the steps which were taken, without the last evaluation."""
    clock = SimpleNamespace(now_s=0.0, perf_counter=lambda: clock.now_s)

    def step(number: int) -> float:
        clock.now_s += 1.0
        return 1.0

    def evaluate(*args: object, **options: object) -> Evaluation:
        clock.now_s += 100.0
        return with_auroc(0.5)

    monkeypatch.setattr(steady_steps, "time", clock)
    monkeypatch.setattr(steps_module, "evaluate", evaluate)
    options = {"eval_every_steps": 2, "num_val_batches": 1, "num_warmup_steps": 0}
    result = train(Events(step), num_steps=1000, patience=1, **options)
    assert result.num_steps == 4
    assert result.samples_per_s_overall == pytest.approx(4 * BATCH_SIZE / (4 * 1 + 100))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"keep_best": "AUC"}, "keep_best is 'AUC'; known: null, auroc, normalized_entropy, loss"),
        ({"keep_best": ["loss"]}, r"keep_best is \['loss'\]; known"),
        ({"keep_best": "loss", "checkpoint": None}, "keep_best keeps a checkpoint, and the run"),
        ({"keep_best": "loss", "checkpoint": CheckpointConfig()}, "set trainer.checkpoint.every_s"),
        ({"keep_best": "loss", "eval_every_steps": None}, "keep_best compares evaluations, .* end"),
        ({"patience": 2, "eval_every_steps": None}, "trainer.patience compares evaluations"),
        ({"patience": 0}, "trainer.patience is 0; it must be"),
        ({"patience": 2, "num_eval_batches": 0}, "trainer.patience .* no batch to evaluate on"),
        ({"keep_best": "auroc", "num_val": 0}, "trainer.keep_best .* give validation data"),
    ],
)
def test_refusals(config, message):
    config = {"checkpoint": RARE, "eval_every_steps": 10, "num_val": 1} | config
    num_val = config.pop("num_val")
    with pytest.raises(ConfigError, match=message):
        TrainerConfig(**config).check_validation(num_val)


def test_evaluations_that_nothing_compares_need_no_data():
    TrainerConfig(eval_every_steps=10).check_validation(0)
    TrainerConfig(eval_every_steps=10, patience=1, num_eval_batches=1).check_validation(1)
