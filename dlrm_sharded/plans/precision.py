"""Precisions: of the weights of tables, and of numbers in exchanges between ranks.

A precision of an exchange is the name of one of TorchRec's communication types. Whatever the
precisions of weights and exchanges, everything is computed in fp32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dlrm_sharded.files.errors import ConfigError

TABLE_BYTES = {"fp32": 4, "fp16": 2}
"""Bytes of a table's weight, by precision. The state of its optimizer is in fp32."""

QUANTIZED_ROW = 32
"""Numbers that share a scale and an offset of 4 bytes each, in int8 and in fp8."""

EXCHANGE_BYTES = {
    "fp32": 4.0,
    "fp16": 2.0,
    "bf16": 2.0,
    "int8": (QUANTIZED_ROW + 8) / QUANTIZED_ROW,
    "fp8": (QUANTIZED_ROW + 8) / QUANTIZED_ROW,
}
"""Bytes of a number in an all-to-all, by precision."""

QUANTIZED = ("int8", "fp8")
"""Precisions whose numbers cannot be added up, so that reductions carry fp16 in their place."""

DEVICE_PRECISIONS = {"cpu": ("fp32", "fp16", "bf16", "int8"), "cuda": tuple(EXCHANGE_BYTES)}
"""Precisions that ranks can exchange, by device type: FBGEMM converts to fp8 on GPUs only."""

SAMPLE_MULTIPLE = 8
"""Samples per rank must be a multiple of this for quantized exchanges: with shards of multiples of
4 columns, rows of `QUANTIZED_ROW` numbers are then whole."""


@dataclass(frozen=True, slots=True)
class ExchangePrecision:
    """Precision of pooled vectors (forward) and of their gradients (backward) between ranks."""

    forward: str = "fp32"
    backward: str = "fp32"

    def __post_init__(self) -> None:
        for precision in (self.forward, self.backward):
            if precision not in list(EXCHANGE_BYTES):  # it may not be hashable
                raise ConfigError(
                    f"exchange_precision is {precision!r}; known: {', '.join(EXCHANGE_BYTES)}, or "
                    "{forward: ..., backward: ...} with two of them"
                )

    @classmethod
    def parse(cls, value: Any) -> ExchangePrecision:
        """Read the precision of both directions, or {forward: ..., backward: ...}.

        Raises:
            ConfigError: a precision is unknown, or a direction is missing.
        """
        if isinstance(value, ExchangePrecision):
            return value
        if not isinstance(value, Mapping):
            return cls(value, value)
        if set(value) != {"forward", "backward"}:
            raise ConfigError(
                f"exchange_precision has the keys {sorted(map(str, value))}; it must have "
                "forward and backward"
            )
        return cls(value["forward"], value["backward"])

    @property
    def is_exact(self) -> bool:
        """Return whether numbers are exchanged in fp32, without rounding."""
        return self.forward == self.backward == "fp32"

    @property
    def in_reductions(self) -> ExchangePrecision:
        """The precision in reductions of row blocks, which cannot add up quantized numbers."""
        return ExchangePrecision(
            *("fp16" if p in QUANTIZED else p for p in (self.forward, self.backward))
        )

    def to_json(self) -> dict[str, str]:
        """Return the form of `exchange_precision` in plan.json."""
        return {"forward": self.forward, "backward": self.backward}

    def __str__(self) -> str:
        if self.forward == self.backward:
            return self.forward
        return f"{self.forward} forward, {self.backward} backward"


FP32_EXCHANGE = ExchangePrecision()


def why_not_exchanged(
    precision: ExchangePrecision, device: str, local_batch_size: int
) -> str | None:
    """Return why ranks cannot exchange numbers of a precision; None if they can.

    Args:
        device: type of the ranks' device.
        local_batch_size: samples of one rank in a step.
    """
    known = DEVICE_PRECISIONS[device]
    for direction in (precision.forward, precision.backward):
        if direction not in known:
            return (
                f"exchange_precision is {direction!r}, which ranks on {device} cannot exchange; "
                f"use {', '.join(known)}"
            )
        if direction in QUANTIZED and local_batch_size % SAMPLE_MULTIPLE:
            return (
                f"exchange_precision is {direction!r}, which needs a multiple of {SAMPLE_MULTIPLE} "
                f"samples on every rank, and each has {local_batch_size:,}; change batch_size, or "
                "use fp16"
            )
    return None
