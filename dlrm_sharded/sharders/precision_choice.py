"""Chooses the precision of a plan's exchanges by predicted cost."""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections.abc import Callable

from dlrm_sharded.cost.base import PricedTask
from dlrm_sharded.plans.plan import ShardingPlan
from dlrm_sharded.plans.precision import FP32_EXCHANGE, ExchangePrecision

log = logging.getLogger(__name__)

SHORTER = "fp16"
"""Precision that is weighed against fp32: it has 11 bits, and every backend adds it up."""

MIN_GAIN = 0.05
"""Smallest gain in predicted cost for which numbers are rounded; smaller ones are within the error
of the model. On 2 gloo ranks, predicted gains of 3 and 4 % were none when measured
(docs/notes/measurements.md, "What are replicas worth?")."""

CANDIDATES = tuple(
    ExchangePrecision(*directions) for directions in itertools.product(("fp32", SHORTER), repeat=2)
)

Search = Callable[[PricedTask], ShardingPlan]


def plan_of_best_precision(priced: PricedTask, search: Search) -> ShardingPlan:
    """Return the cheapest plan, in fp32 unless rounding what is exchanged gains over 5 %.

    Plans are searched for with exchanges in fp32 and with both directions rounded. Each of them is
    then priced with every direction rounded or not.

    Args:
        search: makes a plan under the prices of the task in a precision.
    """
    exact = search(priced.with_precision(FP32_EXCHANGE))
    rounded = search(priced.with_precision(ExchangePrecision.parse(SHORTER)))
    exact_ms = _cost_ms(exact, priced)
    candidates = [
        dataclasses.replace(plan, exchange_precision=precision)
        for plan, precision in itertools.product((exact, rounded), CANDIDATES)
    ]
    best = min(candidates, key=lambda plan: _cost_ms(plan, priced))
    best_ms = _cost_ms(best, priced)
    is_better = best_ms < exact_ms * (1 - MIN_GAIN)
    log.info(
        "exchanges in %s: predicted %.2f ms with fp32, %.2f ms with %s",
        best.exchange_precision if is_better else "fp32",
        exact_ms,
        best_ms,
        best.exchange_precision,
    )
    return best if is_better else exact


def _cost_ms(plan: ShardingPlan, priced: PricedTask) -> float:
    return priced.with_precision(plan.exchange_precision).predict(plan).cost_ms
