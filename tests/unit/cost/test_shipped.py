"""The cost models that the package has load, and are what they say."""

from pathlib import Path

import pytest

from dlrm_sharded import RunContext, learned_cost_model
from dlrm_sharded.cost import learned_arrays, neuroshard_paper
from dlrm_sharded.cost.neuroshard_paper import paper_cost_model
from dlrm_sharded.hardware.artifact import SHIPPED, read_artifact
from dlrm_sharded.hardware.artifact_kinds import cost_model_kind

LOADERS = {"learned": learned_cost_model, "neuroshard_paper": paper_cost_model}
FEATURES = {
    "learned": learned_arrays.learned_features,
    "neuroshard_paper": neuroshard_paper.PAPER_FEATURES,
}
MODELS = sorted(path for kind in LOADERS for path in SHIPPED.glob(f"{kind}-*.safetensors"))


def test_there_is_one_of_each_kind() -> None:
    assert {path.stem.split("-")[0] for path in MODELS} == set(LOADERS)


@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.stem)
def test_loads(path: Path) -> None:
    name = path.stem.split("-")[0]
    meta = read_artifact(path, kind=cost_model_kind(name), features=FEATURES[name]).meta
    assert meta["kind"] == name
    LOADERS[name](RunContext(device=meta["device"]), str(path))
    assert meta["held_out_errors"]["computation, groups"]["num"] > 50
