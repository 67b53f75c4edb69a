"""Tables in fp16, and exchanges: the precision of what they carry, and their groups."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from dlrm_sharded.model.sharded_model import sharded_embeddings
from dlrm_sharded.plans.precision import ExchangePrecision
from dlrm_sharded.ranks.distributed import Rank
from tests.distributed import small_model
from tests.distributed.small_model import all_shards, make_sharded, trained_logits
from tests.distributed.test_checkpoint import HALF
from tests.distributed.test_sharded_equals_unsharded import initial_tables, train_unsharded
from tests.preloaded.ranks import run_ranks

pytestmark = pytest.mark.slow

NUM_SAMPLES = 8
"""Samples of a rank: rows of int8 have 32 numbers, and shards are 4 columns wide or more."""

TOLERANCE = {"fp32": 1e-4, "fp16": 2e-3, "bf16": 2e-2, "int8": 5e-2, "fp8": 0.3}
"""Of the changes of weights and logits relative to the largest one: rounding errors of 2 ** -11,
2 ** -8, of a 255th of the range of 32 numbers and of 2 ** -4, of which several add up."""


def trained(rank: Rank, kind: str, precisions: list[ExchangePrecision]) -> list[dict[str, Any]]:
    """Train in each precision; what came out, of all ranks."""
    small_model.LOCAL_BATCH_SIZE = NUM_SAMPLES
    results = []
    for precision in precisions:
        sharded, optimizer = make_sharded(rank, kind, "sgd", exchange_precision=precision)
        results.append(
            {
                "initial": initial_tables(rank.device),
                "logits": trained_logits(rank, sharded, optimizer),
                "shards": all_shards(rank, sharded),
            }
        )
    return results


def relative(found: torch.Tensor, expected: torch.Tensor, scale: torch.Tensor) -> float:
    return float((found - expected).abs().max() / scale.abs().max())


@pytest.mark.parametrize(
    ("world_size", "kind"), [(1, "columns_uneven"), (2, "columns_uneven"), (2, "rows_and_columns")]
)
def test_trains_within_rounding_of_the_unsharded_model(world_size, kind, monkeypatch):
    monkeypatch.setattr(small_model, "LOCAL_BATCH_SIZE", NUM_SAMPLES)
    precisions = [
        *(ExchangePrecision(p, p) for p in ("fp32", "fp16", "bf16", "int8")),
        ExchangePrecision("fp16", "fp32"),
        ExchangePrecision("fp32", "int8"),
    ]
    results = run_ranks(trained, world_size, kind, precisions)
    check_within_rounding(results, precisions, kind, world_size)


def check_within_rounding(
    results: list[dict[str, Any]], precisions: list[ExchangePrecision], kind: str, world_size: int
) -> None:
    """Check what was trained in each precision, fp32 first."""
    exact, initial = results[0], results[0]["initial"]
    expected = train_unsharded(kind, "sgd", world_size, initial)
    for precision, found in zip(precisions, results, strict=True):
        tolerance = max(TOLERANCE[precision.forward], TOLERANCE[precision.backward])
        logits = expected["logits"]
        assert relative(found["logits"], logits, logits - logits.mean()) <= tolerance, precision
        for name, place, weights in found["shards"]:
            change = expected["tables"][name] - initial[name]
            off = relative(weights, expected["tables"][name][place], change)
            assert off <= tolerance, f"{precision}: {name}"
        # one rank exchanges nothing, so nothing is rounded
        is_same = torch.equal(found["logits"], exact["logits"])
        assert is_same == (world_size == 1 or precision.is_exact), precision


def groups(rank: Rank) -> dict[str, Any]:
    sharded, _ = make_sharded(rank, "table_wise", "sgd")
    wrapped = sharded._dmp_wrapped_module
    is_reduced = isinstance(wrapped, DistributedDataParallel)
    return {
        "dense_in_world": is_reduced and wrapped.process_group is dist.group.WORLD,
        "tables_in_world": sharded_embeddings(sharded)._env.process_group is dist.group.WORLD,
        "is_reduced": is_reduced,
    }


def test_tables_do_not_wait_for_dense_gradients():
    expected = {"dense_in_world": True, "tables_in_world": False, "is_reduced": True}
    assert run_ranks(groups, 2) == expected


def test_one_rank_reduces_nothing():
    assert not run_ranks(groups, 1)["is_reduced"]


def train_in_both(
    rank: Rank, kinds: list[str], embedding: str = "rowwise_adagrad"
) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for kind in kinds:
        for names in ((), HALF):
            sharded, optimizer = make_sharded(rank, kind, embedding, half=names)
            results[f"{kind}-{len(names)}"] = {
                "initial": initial_tables(rank.device),
                "before": all_shards(rank, sharded),
                "logits": trained_logits(rank, sharded, optimizer),
                "after": all_shards(rank, sharded),
            }
    return results


@pytest.mark.parametrize("embedding", ["rowwise_adagrad", "elementwise_adagrad"])
def test_trains_within_rounding(embedding):
    kinds = ["columns_uneven", "row_wise", "rows_and_columns"]
    check_half_tables(run_ranks(train_in_both, 2, kinds, embedding), kinds)


def check_half_tables(results: dict[str, Any], kinds: list[str]) -> None:
    for kind in kinds:
        exact, found = results[f"{kind}-0"], results[f"{kind}-2"]
        assert found["logits"].dtype == torch.float32
        torch.testing.assert_close(found["logits"], exact["logits"], rtol=0.01, atol=0.01)
        for name, place, weights in found["before"]:
            initial = found["initial"][name][place]
            assert weights.dtype == (torch.float16 if name in HALF else torch.float32)
            torch.testing.assert_close(weights, initial.to(weights.dtype), rtol=0.0, atol=0.0)
        for before, after, in_fp32 in zip(
            found["before"], found["after"], exact["after"], strict=True
        ):
            assert after[:2] == in_fp32[:2]
            assert not torch.equal(before[2], after[2]), after[0]
            torch.testing.assert_close(after[2].float(), in_fp32[2], rtol=0.01, atol=0.01)
