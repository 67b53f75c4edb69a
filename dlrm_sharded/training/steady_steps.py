"""The steps after the warm-up of a run, from whose times its throughput follows."""

from __future__ import annotations

import math
import time

import numpy as np

from dlrm_sharded.training.profiler import StepProfiler
from dlrm_sharded.training.progress import Progress


class SteadySteps:
    """Records the times of a run's steps after the warm-up, including those before it was resumed.

    Args:
        profiler: traces some steps, which slows them down; None for no trace.

    Attributes:
        step_ms: times of steps, measured on the device, without the warm-up and traced steps.
    """

    def __init__(
        self, start: Progress, profiler: StepProfiler | None, *, num_warmup: int, num_steps: int
    ) -> None:
        self.step_ms: list[float] = start.step_ms.tolist()
        self._profiler, self._num_warmup, self._num_steps = profiler, num_warmup, num_steps
        self._earlier_s = start.steady_s
        self._first_step = start.step
        self._since_s = self._until_s = self._last_s = math.nan

    def begin(self) -> None:
        """Note that training begins."""
        self._last_s = now_s = time.perf_counter()
        if self._first_step > self._num_warmup:
            self._since_s = now_s - self._earlier_s
        if self._first_step == self._num_steps:
            self._until_s = now_s

    def before_step(self, step: int) -> None:
        """Note that a step begins."""
        if step == self._num_warmup + 1:
            self._since_s = time.perf_counter()

    def after_step(self, step: int) -> None:
        """Note that a step has ended, and that its losses are logged."""
        self._last_s = time.perf_counter()
        if step == self._num_steps:
            self._until_s = self._last_s

    def end_early(self, step: int) -> None:
        """Note that this step, the last one taken, ends the training run."""
        self._num_steps, self._until_s = step, self._last_s

    def seconds(self, step: int) -> float:
        """Return the time from the warm-up to a step as if none were traced; nan if all were."""
        until_s = time.perf_counter() if math.isnan(self._until_s) else self._until_s
        steady_s = until_s - self._since_s
        if self._profiler is None or not self._profiler.num_done:
            return steady_s
        num_steps = step - self._num_warmup
        num_untraced = num_steps - self._profiler.num_done
        if num_untraced < 1:
            return math.nan
        return (steady_s - self._profiler.spent_s) * num_steps / num_untraced

    def samples_per_s(self, batch_size: int) -> tuple[float, float]:
        """Return the throughput of all steps, and a throughput that nine tenths of them exceed."""
        num_steps = self._num_steps - self._num_warmup
        overall = batch_size * num_steps / self.seconds(self._num_steps)
        return overall, float(batch_size / self.percentile_ms(90) * 1e3)

    def percentile_ms(self, percent: float) -> float:
        """Return a percentile of the steps' times; nan if the run was all warm-up."""
        return float(np.percentile(self.step_ms or [math.nan], percent))
