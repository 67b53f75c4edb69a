"""The steps after the warm-up of a run, from whose times its throughput follows."""

from __future__ import annotations

import math
import time

import numpy as np

from dlrm_sharded.training.progress import Progress


class SteadySteps:
    """Records the times of a run's steps after the warm-up, including those before it was resumed.

    Attributes:
        step_ms: times of steps, measured on the device, without the warm-up and traced steps.
    """

    def __init__(self, start: Progress, *, num_warmup: int, num_steps: int) -> None:
        self.step_ms: list[float] = start.step_ms.tolist()
        self._num_warmup, self._num_steps = num_warmup, num_steps
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

    def seconds(self) -> float:
        """Return the time since the warm-up, until now or the last step; nan before its end."""
        until_s = time.perf_counter() if math.isnan(self._until_s) else self._until_s
        return until_s - self._since_s

    def samples_per_s(self, batch_size: int) -> tuple[float, float]:
        """Return the throughput of all steps, and a throughput that nine tenths of them exceed."""
        num_steps = self._num_steps - self._num_warmup
        overall = batch_size * num_steps / self.seconds()
        return overall, float(batch_size / self.percentile_ms(90) * 1e3)

    def percentile_ms(self, percent: float) -> float:
        """Return a percentile of the steps' times; nan if the run was all warm-up."""
        return float(np.percentile(self.step_ms or [math.nan], percent))
