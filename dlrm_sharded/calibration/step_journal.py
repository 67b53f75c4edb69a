"""The journal of steps: how much longer runs took for a step than its composed parts.

A run measures its step anyway. What the parts do not explain, such as how the ranks of this machine
disturb each other, is much the same in the next run there.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dlrm_sharded.calibration.run_journal import Conditions, RunJournal
from dlrm_sharded.step.prediction import COMPOSITION_ERROR, StepCorrection

log = logging.getLogger(__name__)

STEPS_FORMAT = 1
MAX_STEPS = 30
"""Number of the latest runs that are read."""

PRIOR_RUNS = 1.0
"""Number of runs that the expectation of no correction counts for."""

FACTORS = (0.2, 5.0)
"""Range of the ratios that are taken for measurements."""


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


@dataclass(frozen=True, slots=True)
class StepJournal:
    """The steps of runs under some conditions, in a file below the folder of the runs' plans."""

    path: Path
    conditions: StepConditions

    @classmethod
    def beside(cls, journal: RunJournal, conditions: StepConditions) -> StepJournal:
        """Return the journal of the same hardware."""
        return cls(journal.path.parent / "steps" / journal.path.name, conditions)

    def append(self, step: MeasuredStep) -> None:
        """Write a step at the end; a file that cannot be written costs a warning."""
        fields = {
            "format": STEPS_FORMAT,
            **self.conditions.to_json(),
            "composed_ms": step.composed_ms,
            "measured_ms": step.measured_ms,
        }
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a") as file:
                file.write(json.dumps(fields) + "\n")
        except OSError as error:
            log.warning("the step is not noted in the journal %s: %s", self.path, error)

    def read(self) -> list[MeasuredStep]:
        """Return the latest steps; lines that are no steps are passed over with one warning."""
        try:
            lines = self.path.read_bytes().splitlines()
        except FileNotFoundError:
            return []
        except OSError as error:
            log.warning("the journal of steps %s cannot be read: %s", self.path, error)
            return []
        steps, num_damaged = [], 0
        for line in lines:
            try:
                found = _read(json.loads(line), self.conditions)
            except (AttributeError, LookupError, TypeError, ValueError, RecursionError):
                num_damaged += 1
                continue
            if found is not None:
                steps.append(found)
        if num_damaged:
            log.warning(
                "%d of %d lines of the journal of steps %s are damaged and passed over",
                num_damaged,
                len(lines),
                self.path,
            )
        return steps[-MAX_STEPS:]


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


def _read(fields: Mapping[str, Any], conditions: StepConditions) -> MeasuredStep | None:
    """Return the step of a line, or None if its conditions differ."""
    if fields["format"] != STEPS_FORMAT:
        raise ValueError(f"format {fields['format']!r}")
    step = MeasuredStep(float(fields["composed_ms"]), float(fields["measured_ms"]))
    ratio = step.measured_ms / step.composed_ms if step.composed_ms else math.inf
    if not FACTORS[0] <= ratio <= FACTORS[1]:
        raise ValueError(f"a measured step of {ratio:.3g} times its parts")
    expected = conditions.to_json()
    return step if {key: fields[key] for key in expected} == expected else None
