"""First runs that measure a few plans however fast the machine is: a measurement is a second."""

import itertools
from types import SimpleNamespace
from typing import Any

from dlrm_sharded.calibration import collect
from dlrm_sharded.measuring.measure import MeasureConfig

QUICK = MeasureConfig(iterations=3, warmup=1, num_batches=2, time_budget_s=0.01)


def count_measurements(other_work: str | None = None) -> list[int]:
    """Let the clock of the collector count measurements; return the list of those to come.

    Args:
        other_work: the load that the collector sees, whatever the machine does.
    """
    measured: list[int] = []
    looks = itertools.count(1)
    draw_plan = collect.draw_plan

    def counted(number: int, *arguments: Any, **options: Any) -> Any:
        measured.append(number)
        return draw_plan(number, *arguments, **options)

    collect.MEASURE = QUICK
    collect.draw_plan = counted
    collect.core_wait_s = lambda: 0.0
    collect.time = SimpleNamespace(perf_counter=lambda: len(measured) + 1e-6 * next(looks))
    collect._other_work = lambda *found: other_work
    return measured
