"""A run with caches in its lookups that is interrupted trains what one without them does."""

import torch

from dlrm_sharded.checkpoint.folder import checkpoints
from dlrm_sharded.checkpoint.manifest import read_manifest
from dlrm_sharded.checkpoint.restore import load_whole
from dlrm_sharded.checkpoint.storage import is_weight
from tests import preloaded
from tests.conftest import SMALL_RUN
from tests.e2e.runs import environment, result_of, train_alone


def test_measured_saved_resumed_and_evaluated(tmp_path):
    whole, cached = tmp_path / "whole", tmp_path / "cached"
    settings = (*SMALL_RUN, "sharder=dim", "trainer.checkpoint.every_steps=5")
    train_alone(whole, *settings)
    for more in (["trainer.num_steps=7"], ["resume=auto"]):
        run = ["-m", "tests.cached_lookups", f"hydra.run.dir={cached}", *settings, *more]
        preloaded.run(*run, env=environment(), exit_code=0)
    expected, found = (read_manifest(checkpoints(folder)[0]) for folder in (whole, cached))
    assert expected.state.step == found.state.step == 12
    for name in filter(is_weight, expected.tensors):
        assert torch.equal(load_whole(found, name), load_whole(expected, name)), name
    for key in ("auroc", "loss"):
        assert result_of(cached)[key] == result_of(whole)[key]
