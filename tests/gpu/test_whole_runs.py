"""A run on the device that it is for also saves, goes on, exchanges, traces and stops.

The functions are those of `tests/distributed`, which calls them on CPUs. On a GPU they meet
FBGEMM's kernels and caches, NCCL, and copies to page-locked memory; results are compared within
`CLOSE`, as sums on a GPU, and those of three ranks, have no fixed order.
"""

from typing import Any

import pytest

from dlrm_sharded.checkpoint.restore import load_whole
from dlrm_sharded.plans.precision import DEVICE_PRECISIONS, ExchangePrecision
from dlrm_sharded.training.pipelines import PIPELINES
from tests.distributed import small_model
from tests.distributed import test_exchanges as exchanges
from tests.distributed.small_model import PLANS, TABLES
from tests.distributed.test_checkpoint import HALF, check_equal, load_into, newest, save_trained
from tests.distributed.test_pipeline import preempted
from tests.distributed.test_profiler import check_traces, trace_steps
from tests.gpu.devices import gpus, needs_gpus, run_on

pytestmark = needs_gpus(1)

CLOSE = 1e-5
"""Largest difference, relative and absolute, of what is trained twice."""


def close(expected: Any) -> Any:
    return pytest.approx(expected, rel=CLOSE, abs=CLOSE)


def test_a_checkpoint_loads_under_every_plan(tmp_path):
    run_on("cuda", save_trained, "columns_uneven", "rowwise_adagrad", str(tmp_path), HALF)
    run_on("cuda", load_into, list(PLANS), "rowwise_adagrad", str(tmp_path))
    before = newest(tmp_path)
    assert any(float(load_whole(before, f"tables.{t.name}.weight").abs().max()) for t in TABLES)
    for kind in PLANS:
        check_equal(before, newest(tmp_path / kind))


def test_half_precision_tables():
    kinds = ["columns_uneven", "row_wise", "rows_and_columns"]
    exchanges.check_half_tables(run_on("cuda", exchanges.train_in_both, kinds), kinds)


@pytest.mark.parametrize("kind", ["columns_uneven", "rows_and_columns"])
def test_every_precision_of_exchanges(kind, monkeypatch):
    """Also those of which a direction has its own."""
    monkeypatch.setattr(small_model, "LOCAL_BATCH_SIZE", exchanges.NUM_SAMPLES)
    precisions = [
        *(ExchangePrecision(p, p) for p in DEVICE_PRECISIONS["cuda"]),
        ExchangePrecision("fp16", "fp32"),
        ExchangePrecision("fp32", "int8"),
    ]
    assert precisions[0].is_exact
    results = run_on("cuda", exchanges.trained, kind, precisions)
    exchanges.check_within_rounding(results, precisions, kind, len(gpus()))


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_traces(pipeline, tmp_path):
    run_on("cuda", trace_steps, "columns_uneven", pipeline, tmp_path)
    check_traces(tmp_path, len(gpus()))


def test_a_preempted_training_goes_on(tmp_path):
    """Rank 0 alone has the signal; all of them stop after the same step."""
    _, whole, before, after = run_on("cuda", preempted, "base", str(tmp_path))
    assert 5 <= len(before) < len(whole)
    assert before + after == close(whole)
