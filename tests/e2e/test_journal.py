"""Runs that teach: what one has measured corrects the prediction of the next."""

import json
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest

from dlrm_sharded.cost.learned import KIND
from dlrm_sharded.cost.learned_arrays import from_arrays, learned_features, to_arrays
from dlrm_sharded.hardware.artifact import SHIPPED, read_artifact, write_artifact
from dlrm_sharded.hardware.artifact_kinds import cost_model_kind
from tests.conftest import SMALL_RUN
from tests.e2e.runs import result_of, train

pytestmark = pytest.mark.slow

FACTOR = 30.0

BESIDE_OTHERS = "measured beside other work, so it counts less"

MOST_RUNS = 5
"""Number of runs, where those before say that they were measured beside other work."""


@pytest.fixture
def absurd(tmp_path: Path) -> Path:
    """A cost model whose lookups take 30 times as long as the packaged one's, of other hardware.

    So it is a prior on every machine: one run moves calibrated prices little.
    """
    (path,) = SHIPPED.glob(f"{KIND}-cpu*.safetensors")
    found = read_artifact(path, kind=cost_model_kind(KIND), features=learned_features)
    compute, communication = from_arrays(found.arrays, "cpu")
    arrays = to_arrays(compute.scaled(forward=FACTOR, backward=FACTOR), communication)
    assert np.isfinite(arrays["forward.bias_1"]).all()
    meta = found.meta | {"hardware": "cpu: another", "fingerprint": None}
    return write_artifact(tmp_path / "artifacts", "learned-absurd", arrays, meta)


def test_each_run_corrects_the_next(tmp_path, absurd):
    overrides = [*SMALL_RUN, f"cost_model.artifact={absurd}", f"journal={tmp_path / 'journal'}"]
    errors: list[float] = []
    counts_less = False
    for number in range(MOST_RUNS):
        if number >= 2 and (errors[-1] < errors[0] / 2 or not counts_less):
            break
        folder = tmp_path / f"run{number}"
        done = train(folder, *overrides)
        prices = json.loads((folder / "plan.json").read_text())["prices"]
        assert prices["num_runs"] == number, done.stderr
        counts_less |= BESIDE_OTHERS in done.stderr
        result = result_of(folder)
        assert ("corrected by 1 run" in str(result["prices"])) == (number == 1)
        predicted, measured = result["predicted_ms"], result["embedding_cost_ms"]
        errors.append(abs(np.log(predicted / measured)))
    assert errors[-1] < errors[0] / 2
    (journal,) = (tmp_path / "journal").glob("*.jsonl")
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    assert [line["fbgemm"] for line in lines] == [version("fbgemm-gpu-cpu")] * len(errors)
