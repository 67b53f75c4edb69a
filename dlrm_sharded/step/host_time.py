"""The host's time of a step on GPUs: Python, dispatch and launches, beside which a GPU computes.

A step takes as long as the slower of the two needs. On a CPU the host is the device, and there is
no such time. What was not measured follows from a reading of the sources of torch 2.13, TorchRec
1.8 and this trainer for MLPerf's model in bfloat16: a step, of 161 operators in its dense part and
one fused lookup, takes the host 7 ms in eager PyTorch.
"""

from __future__ import annotations

from dataclasses import dataclass

OPERATOR_MS = 0.0264
"""Host time of an operator of the dense part that computes: its dispatch, what autograd does for
it, its launch, and the operators around it that only view or allocate memory."""

COMPILED_SHARE = 0.6
"""Host time of the dense part in compiled layers relative to that of its operators."""

IDS_MS = 1.6
"""Host time to redistribute the ids, in which the host waits for two small exchanges, and of what
all lookups share."""

LOOKUP_MS = 0.6
"""Host time of a fused lookup of a rank: lookup, exchange of its vectors, and both backward."""

LOOP_MS = 0.55
"""Host time of the rest: copying the batch, learning rates, the all-reduce, and the loop."""

HOST_ERROR = 0.3
"""Relative error of host times that follow from reading: nobody measured them on a GPU yet."""

MEASURED_ERROR = 0.1
"""Relative error of host times that were measured one by one, each from a barrier."""


@dataclass(frozen=True, slots=True)
class HostTime:
    """The time that the host of the slowest rank needs for a step.

    Args:
        dense_ms: of the dense part, with its optimizer.
        lookups_ms: of the ids' redistribution, the lookups and their exchanges.
        measured: which of the two were measured: "dense", "lookups".
        factor: of all parts.
    """

    dense_ms: float
    lookups_ms: float
    measured: frozenset[str] = frozenset()
    factor: float = 1.0

    @property
    def ms(self) -> float:
        """Sum of all parts."""
        return self.factor * (self.dense_ms + self.lookups_ms + LOOP_MS)

    @property
    def error(self) -> float:
        """Relative error: that of each part, for its share of the sum."""
        parts = {"dense": self.dense_ms, "lookups": self.lookups_ms, "loop": LOOP_MS}
        errors = {name: MEASURED_ERROR if name in self.measured else HOST_ERROR for name in parts}
        return sum(errors[name] * ms for name, ms in parts.items()) / sum(parts.values())

    @property
    def source(self) -> str:
        """Where the time is from: "measured", "measured in part" or "a prior"."""
        return ("a prior", "measured in part", "measured")[len(self.measured)]


def lookups_prior_ms(num_lookups: int) -> float:
    """Return the host time of the ids and of the fused lookups of a rank."""
    return IDS_MS + LOOKUP_MS * num_lookups


def operators_prior_ms(num_operators: int, *, compiled: bool) -> float:
    """Return the host time of the operators of the dense part.

    Args:
        compiled: whether torch.compile joins most of them.
    """
    return OPERATOR_MS * num_operators * (COMPILED_SHARE if compiled else 1.0)
