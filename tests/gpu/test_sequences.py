"""Sequences on the device that they are for, whole and in row blocks, train as one CPU does."""

from typing import Any

import pytest

from dlrm_sharded.ranks.distributed import Rank
from tests.distributed.test_module_kinds import train_sharded
from tests.gpu.devices import gpus, needs_gpus, results_on

CASES = [("sequences", "dim"), ("sequences", "rows")]
NUM_RANKS = [1, 2, max(len(gpus()), 3)]


def train_all(rank: Rank) -> dict[str, Any]:
    return train_sharded(rank, CASES)


@pytest.mark.parametrize(("kind", "name"), CASES)
@pytest.mark.parametrize("num_ranks", [pytest.param(n, marks=needs_gpus(n)) for n in NUM_RANKS])
def test_sequences_train_like_one_cpu(num_ranks: int, kind: str, name: str) -> None:
    found = results_on("cuda", train_all, num_ranks)
    assert "error" not in found, found["error"]
    result = found[f"{kind}-{name}"]
    assert result["lies"] == result["planned"]
    assert result["least_change"] > 1e-3
    assert max(result["output_error"], result["error"]) < 1e-4
