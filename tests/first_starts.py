"""First starts that measure a few plans however fast the machine is: a measurement is a second."""

from typing import Any

from dlrm_sharded.calibration import start_measurement
from dlrm_sharded.measuring.measure import MeasureConfig

QUICK = MeasureConfig(iterations=3, warmup=1, num_batches=2, time_budget_s=0.01)


def count_measurements() -> list[int]:
    """Let the clock of first starts count measurements; return the list of those to come."""
    measured: list[int] = []
    measure, measure_plans = start_measurement._measure, start_measurement.measure_plans

    def counted(*arguments: Any) -> Any:
        measured.append(len(measured))
        return measure(*arguments)

    start_measurement.MEASURE = QUICK
    start_measurement._measure = counted
    start_measurement.measure_plans = lambda *arguments, **options: measure_plans(
        *arguments, **options | {"started_s": 0.0, "clock": lambda: float(len(measured))}
    )
    return measured
