"""The journal of steps: how much longer runs took for a step than its composed parts.

A run measures its step anyway. What the parts do not explain, such as how the ranks of this machine
disturb each other, is much the same in the next run there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dlrm_sharded.files.errors import ConfigError, DataError, check_number
from dlrm_sharded.files.line_file import LineFile
from dlrm_sharded.fitting.run_journal import Conditions, RunJournal
from dlrm_sharded.step.prediction import COMPOSITION_ERROR, StepCorrection

STEPS_FORMAT = 1
MAX_STEPS = 30
"""Number of the latest runs that are read."""

PRIOR_RUNS = 1.0
"""Number of runs that the expectation of no correction counts for."""

FACTORS = (0.2, 5.0)
"""Range of the ratios that correct other steps; beyond it, something else took the time."""

MAX_STEP_MS = 3.6e6
"""Longest step that is believed: an hour."""


@dataclass(frozen=True, slots=True)
class StepConditions:
    """Conditions that two runs must share for one to tell of the other's steps.

    Args:
        pipeline: what runs beside what, see `step.schedule.Overlap`.
    """

    run: Conditions
    pipeline: str

    def to_json(self) -> dict[str, Any]:
        """Return the conditions by name."""
        return {
            "optimizer": self.run.optimizer,
            "ranks_per_host": self.run.ranks_per_host,
            "pipeline": self.pipeline,
        }


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """A step of a run, and what its measured parts make."""

    composed_ms: float
    measured_ms: float

    def check(self) -> None:
        """Raise DataError unless the step tells how much longer than their parts steps take."""
        for key, step_ms in (("composed_ms", self.composed_ms), ("measured_ms", self.measured_ms)):
            try:
                check_number(key, step_ms, most=MAX_STEP_MS, above=True)
            except ConfigError as error:
                raise DataError(str(error)) from error
        ratio = self.measured_ms / self.composed_ms
        if not FACTORS[0] <= ratio <= FACTORS[1]:
            raise DataError(
                f"a step took {self.measured_ms:.4g} ms, {ratio:.3g} times as long as its parts; "
                f"{FACTORS[0]:g} to {FACTORS[1]:g} times correct other steps"
            )


@dataclass(frozen=True, slots=True)
class StepJournal:
    """The steps of runs under some conditions, in a file below the folder of the runs' plans.

    Args:
        outbox: see `LineFile`.
    """

    path: Path
    conditions: StepConditions
    outbox: Path | None = None

    @classmethod
    def beside(cls, journal: RunJournal, conditions: StepConditions) -> StepJournal:
        """Return the journal of the same hardware."""
        path = journal.path.parent / "steps" / journal.path.name
        return cls(path, conditions, journal.outbox)

    def append(self, step: MeasuredStep) -> bool:
        """Write a step at the end and return True; if that is impossible, warn and return False."""
        try:
            step.check()
        except DataError as error:
            self._file.refuse(str(error))
            return False
        return self._file.note(
            {
                **self.conditions.to_json(),
                "composed_ms": step.composed_ms,
                "measured_ms": step.measured_ms,
            }
        )

    def read(self) -> list[MeasuredStep]:
        """Return the latest steps; lines that are no steps are passed over with one warning."""
        return list(self._file.latest(self._step_of, most=MAX_STEPS).values())

    def _step_of(self, fields: Mapping[str, Any]) -> MeasuredStep | None:
        """Return the step of a line, or None if its conditions differ."""
        step = MeasuredStep(fields["composed_ms"], fields["measured_ms"])
        step.check()
        expected = self.conditions.to_json()
        return step if {key: fields[key] for key in expected} == expected else None

    @property
    def _file(self) -> LineFile:
        return LineFile(self.path, "step", STEPS_FORMAT, self.outbox)


def correction_of(steps: list[MeasuredStep]) -> StepCorrection:
    """Return the factor by which composed steps are corrected, and its error.

    The factor is the geometric mean of the ratios, drawn towards 1 for few runs. Its error is that
    of one more run, and falls from the error without any run to how much the runs vary.
    """
    if not steps:
        return StepCorrection()
    ratios = np.log([step.measured_ms / step.composed_ms for step in steps])
    weight = len(steps) / (len(steps) + PRIOR_RUNS)
    mean = weight * float(np.median(ratios))
    varied = float(np.sqrt(np.mean(np.square(ratios - mean))))
    error = math.hypot((1 - weight) * COMPOSITION_ERROR, varied)
    return StepCorrection(math.exp(mean), error, len(steps))
