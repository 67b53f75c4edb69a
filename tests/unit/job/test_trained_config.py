"""What of a config decides a training, for the ranks of a job and for a run that goes on."""

from typing import Any

import pytest

from dlrm_sharded.datasets.presets import embedding_demo
from dlrm_sharded.datasets.synthetic import SyntheticDataset
from dlrm_sharded.job.trained_config import (
    flat,
    must_match_at_start,
    must_match_in_data,
    refused_and_changed,
)

WRITTEN: dict[str, Any] = {
    "batch_size": 256,
    "seed": 0,
    "data": {
        "_target_": "synthetic",
        "alpha": 0.9,
        "seed": 0,
        "num_val_batches": 4,
        "pregenerate": True,
        "source": {"files": "day_*", "min_count": 3},
        "tables": [{"name": "a", "rows": 5}],
    },
    "model": {"over_layers": [64, 1], "bf16": False},
    "optimizer": {"embedding": "sgd", "dense": "sgd", "dense_learning_rate": 0.1},
    "trainer": {"num_steps": 10, "tf32": True, "checkpoint": {"every_s": 600}},
    "sharder": {"_target_": "dim"},
    "topology": {"memory_gib": None},
    "journal": "auto",
}


def changed(key: str, value: Any) -> dict[str, Any]:
    """The config with another value of one key."""
    *groups, last = key.split(".")
    config: Any = {**WRITTEN}
    node = config
    for group in groups:
        node[group] = {**node.get(group, {})}
        node = node[group]
    node[last] = value
    return config


def test_keys_are_those_of_overrides():
    config = {"a": {"b": [1, 2], "c": {}}, "d": [{"e": None}, [3]], "f": "x"}
    assert flat(config) == {"a.b": [1, 2], "d.0.e": None, "d.1": [3], "f": "x"}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("batch_size", 512),
        ("seed", 1),
        ("data.seed", 9),
        ("data.alpha", 0.2),
        ("data._target_", "mine"),
        ("data.source.min_count", 2),
        ("data.tables", [{"name": "a", "rows": 6}]),
        ("model.over_layers", [32, 1]),
        ("optimizer.embedding", "adam"),
    ],
)
def test_a_run_cannot_go_on_with_other_samples_or_another_model(key, value):
    refused, may_change = refused_and_changed(WRITTEN, changed(key, value))
    assert refused[0].startswith(key)
    assert may_change == []


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("data.source.files", "/elsewhere/day_*"),
        ("data.num_val_batches", 8),
        ("data.of_a_later_version", 1),
        ("optimizer.dense_learning_rate", 0.2),
        ("exchange_precision", "fp16"),
        ("trainer.tf32", False),
        ("trainer.pipeline", "base"),
        ("model.bf16", True),
    ],
)
def test_a_run_goes_on_with_another_way_to_train_and_says_so(key, value):
    refused, may_change = refused_and_changed(WRITTEN, changed(key, value))
    assert refused == []
    assert may_change[0].startswith(f"{key} is ")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("data.pregenerate", False),
        ("data.of_a_later_version", None),
        ("trainer.num_steps", 20),
        ("trainer.checkpoint.every_s", 60),
        ("sharder._target_", "random"),
        ("topology.memory_gib", 10),
        ("journal", "none"),
    ],
)
def test_what_decides_no_training_may_change(key, value):
    assert refused_and_changed(WRITTEN, changed(key, value)) == ([], [])


def test_ranks_may_differ_in_what_is_of_a_host():
    """The path of the data and the memory of a rank; but not in a step of the schedule."""
    here = must_match_at_start(flat(WRITTEN))
    assert here.keys() >= {"seed", "data.alpha", "trainer.num_steps", "sharder._target_"}
    assert here.keys() >= {"version of torch", "version of python", "code of dlrm_sharded"}
    assert not here.keys() & {"journal", "topology.memory_gib", "data.source.files"}


def test_other_data_under_the_same_path_is_other_data():
    def must_match(**options: Any) -> dict[str, Any]:
        options = {"num_train_batches": 4, "num_val_batches": 2} | options
        return must_match_in_data(SyntheticDataset(embedding_demo(), batch_size=32, **options))

    assert must_match(max_rows=50) == must_match(max_rows=50)
    assert must_match(max_rows=50) != must_match(max_rows=51)
    assert must_match(max_rows=50) != must_match(max_rows=50, num_val_batches=3)
    assert must_match(max_rows=50) != must_match(max_rows=50, alpha=0.2)
