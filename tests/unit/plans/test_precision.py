"""Precisions of exchanges: how they are written, and which ranks exchange them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dlrm_sharded import ConfigError, InvalidPlanError, Table, validate
from dlrm_sharded.files.json_files import write_json
from dlrm_sharded.plans.plan import Shard, ShardingPlan, read_plan
from dlrm_sharded.plans.precision import FP32_EXCHANGE, ExchangePrecision, why_not_exchanged
from tests.unit.synthetic import task_of

FP16 = ExchangePrecision("fp16", "fp16")
TABLE = Table("a", 16, 8, 1.0)
PLAN = ShardingPlan(1, (Shard.whole(TABLE, 0),))


@pytest.mark.parametrize(
    ("value", "expected", "text"),
    [
        ("fp32", FP32_EXCHANGE, "fp32"),
        ("fp16", FP16, "fp16"),
        ({"forward": "int8", "backward": "bf16"}, ExchangePrecision("int8", "bf16"), None),
        (FP16, FP16, "fp16"),
    ],
    ids=["fp32", "fp16", "mapping", "value"],
)
def test_is_read_and_written(value: Any, expected: ExchangePrecision, text: str | None) -> None:
    precision = ExchangePrecision.parse(value)
    assert precision == expected == ExchangePrecision.parse(precision.to_json())
    assert str(precision) == (text or "int8 forward, bf16 backward")
    assert precision.is_exact == (precision == FP32_EXCHANGE)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("fp64", r"exchange_precision is 'fp64'; known: fp32, fp16, bf16, int8, fp8"),
        (None, r"exchange_precision is None; known"),
        (16, r"exchange_precision is 16; known"),
        (["fp16"], r"exchange_precision is \['fp16'\]; known"),
        ({"forward": "fp16"}, r"has the keys \['forward'\]; it must have forward and backward"),
        ({"forward": "fp16", "backward": "half"}, r"exchange_precision is 'half'; known"),
    ],
    ids=["unknown", "none", "number", "list", "one_direction", "unknown_backward"],
)
def test_is_refused(value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ExchangePrecision.parse(value)


@pytest.mark.parametrize(
    ("precision", "device", "samples", "message"),
    [
        ("fp32", "cpu", 3, None),
        ("fp16", "cpu", 3, None),
        ("bf16", "cpu", 3, None),
        ("int8", "cpu", 16, None),
        ("int8", "cpu", 12, "'int8', which needs a multiple of 8 samples on every rank"),
        ("fp8", "cpu", 16, "'fp8', which ranks on cpu cannot exchange; use fp32, fp16, bf16, int8"),
        ("fp8", "cuda", 16, None),
    ],
)
def test_what_ranks_exchange(precision: str, device: str, samples: int, message: str | None):
    reason = why_not_exchanged(ExchangePrecision("fp32", precision), device, samples)
    assert reason is None if message is None else message in str(reason)


def test_reductions_add_up_no_quantized_numbers() -> None:
    assert ExchangePrecision("int8", "bf16").in_reductions == ExchangePrecision("fp16", "bf16")
    assert FP32_EXCHANGE.in_reductions == FP32_EXCHANGE


def test_a_plan_file_has_the_precision_only_where_it_rounds(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, rounded = tmp_path / "plan.json", ExchangePrecision("fp16", "fp32")
    for precision in (FP32_EXCHANGE, rounded):
        write_json(path, replace(PLAN, exchange_precision=precision).to_json())
        assert read_plan(path).exchange_precision == precision
    assert "exchange_precision" not in PLAN.to_json()
    assert not caplog.records
    write_json(path, PLAN.to_json() | {"exchange_precision": "half"})
    with pytest.raises(InvalidPlanError, match="exchange_precision"):
        read_plan(path)


def test_a_plan_that_the_ranks_cannot_exchange_is_refused() -> None:
    task = task_of([TABLE], 1, batch_size=8)
    validate(replace(PLAN, exchange_precision=FP16), task)
    for precision, batch_size in (("fp8", 8), ("int8", 4)):
        plan = replace(PLAN, exchange_precision=ExchangePrecision(precision, "fp32"))
        message = f"the plan's exchange_precision is '{precision}"
        with pytest.raises(InvalidPlanError, match=message):
            validate(plan, replace(task, batch_size=batch_size))
