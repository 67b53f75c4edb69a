"""Sequences under every layout on the device that they are for, with all optimizers."""

from typing import Any

import pytest

from dlrm_sharded.ranks.distributed import Rank
from tests.distributed.sequence_layouts import LAYOUTS, REPLICATED, train
from tests.distributed.test_sequence_layouts import check
from tests.gpu.devices import gpus, needs_gpus, results_on

RULES = {
    "cpu": ("sgd", "rowwise_adagrad"),
    "cuda": ("sgd", "rowwise_adagrad", "adam", "dense_adam"),
}
"""Optimizers by device: FBGEMM fuses Adam on CUDA, and its dense lookup pools on CPUs."""

NUM_RANKS = {"cpu": [2], "cuda": [1, 2, max(len(gpus()), 3)]}


def cases(device: str) -> list[tuple[str, str]]:
    """Layout and optimizer; replicas have the dense lookup, and no fused optimizer."""
    layouts = ["rows_and_whole"] if device == "cpu" else list(LAYOUTS)
    found = [(layout, rule) for layout in layouts for rule in RULES[device]]
    # beside row blocks with fused optimizers, a test would need both kinds at once
    return found + [(layout, "dense_adam") for layout in REPLICATED if device == "cuda"]


def train_all(rank: Rank) -> dict[str, Any]:
    chosen = cases(rank.device.type)
    return {f"{layout}-{rule}": train(rank, layout, rule) for layout, rule in chosen}


@pytest.mark.parametrize(
    ("device", "num_ranks", "layout", "rule"),
    [
        pytest.param(
            *(device, num_ranks, layout, rule),
            marks=needs_gpus(num_ranks) if device == "cuda" else [],
        )
        for device in NUM_RANKS
        for num_ranks in NUM_RANKS[device]
        for layout, rule in cases(device)
    ],
)
def test_sequences_train_like_one_cpu_in_fp64(
    device: str, num_ranks: int, layout: str, rule: str
) -> None:
    found = results_on(device, train_all, num_ranks)
    assert "error" not in found, found["error"]
    check(found[f"{layout}-{rule}"], layout, num_ranks)
