"""A training of a policy begins with new weights, or with those of an artifact."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hydra.utils import instantiate

from dlrm_sharded.commands.train_policy import initialize
from dlrm_sharded.files.errors import ConfigError, DataError
from dlrm_sharded.hardware.artifact import artifact_name, find_artifact, write_artifact
from dlrm_sharded.hardware.artifact_kinds import RETUNE, policy_kind
from dlrm_sharded.hardware.context import RunContext
from dlrm_sharded.rl.learned_policy import METHODS, POLICY_FEATURES, read_net, to_arrays
from tests.unit.commands.conftest import composed_config
from tests.unit.rl.cases import random_net

each_kind = pytest.mark.parametrize("kind", METHODS)


def check_equal(expected: Any, found: Any) -> None:
    arrays = to_arrays(found)
    for key, array in to_arrays(expected).items():
        np.testing.assert_array_equal(array, arrays[key])


@each_kind
def test_the_packaged_policy_is_not_the_one_made_here(kind, tmp_path, monkeypatch):
    """Or else a second re-tuning would begin with the first one's weights."""
    monkeypatch.chdir(tmp_path)
    made_here = write(kind, Path("calibration"))
    net = METHODS[kind]()
    initialize(net, "packaged", RunContext())
    check_equal(read_net(kind, find_artifact(policy_kind(kind), None, "cpu")), net)
    initialize(net, str(made_here), RunContext())
    check_equal(random_net(kind), net)


@each_kind
def test_random_weights_are_kept(kind):
    net = random_net(kind)
    initialize(net, None, RunContext())
    check_equal(random_net(kind), net)


def test_a_policy_of_another_method(tmp_path):
    path = write("autoshard", tmp_path)
    with pytest.raises(DataError, match="is not a policy of the kind 'dreamshard'"):
        initialize(METHODS["dreamshard"](), str(path), RunContext())


@pytest.mark.parametrize("init_from", [3, "", "missing.safetensors"])
def test_no_policy(init_from):
    with pytest.raises((ConfigError, DataError), match=r"init_from is|cannot read the policy"):
        initialize(METHODS["dreamshard"](), init_from, RunContext())  # type: ignore[arg-type]


def test_the_offered_overrides_compose():
    cfg = composed_config("train_policy", "policy=dreamshard", *RETUNE.split())
    assert (cfg.init_from, cfg.costs) == ("packaged", "predicted")
    assert instantiate(cfg.schedule).num_rounds == 3


def write(kind: str, folder: Path) -> Path:
    """Write a policy with random weights."""
    meta = {"kind": kind, "hardware": "cpu: x", "device": "cpu", "cores": 1, "optimizer": "sgd"}
    meta["features"] = POLICY_FEATURES
    name = artifact_name(kind, "cpu: x")
    return write_artifact(folder, name, to_arrays(random_net(kind)), meta)
