"""Hardware that is made up: packaged prices times factors, and a bench that measures on it.

A measurement has the predicted time, with noise, and takes as long on a clock of its own as it
would, so that a first run learns there what it would learn in its time.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence

import numpy as np

from dlrm_sharded.calibration.collect import MEASURING_SHARE
from dlrm_sharded.calibration.drawn_plans import DrawnPlan, draw_plan
from dlrm_sharded.calibration.hardware_costs import FIRST_RUN_S
from dlrm_sharded.calibration.plan_limits import PlanLimits
from dlrm_sharded.calibration.samples import Sample
from dlrm_sharded.cost.communication import EXCHANGES
from dlrm_sharded.cost.learned import LearnedCostModel
from dlrm_sharded.cost.workload import workload_of_plan
from dlrm_sharded.files.errors import ConfigError
from dlrm_sharded.plans.plan_cost import STAGES
from dlrm_sharded.plans.tables import Table

LIMITS = PlanLimits(table_bytes=2**29, ids_per_step=300_000, vector_bytes=10**8)
NUM_RANKS, NUM_COMPUTING = 4, 2
"""Ranks that exchange, and those that two cores let compute at once."""

NOISE = 0.05
"""Standard deviation of the logarithm of a made-up measurement."""

ITERATIONS, ITERATIONS_S, SAMPLE_S, ID_S = 9, 0.25, 0.15, 2e-7
"""A measurement takes this many iterations or seconds, and so long besides, also for each id."""

TERMS = {
    "columns": ("id_columns", "id_lines"),
    "rows from memory": ("id_lines_of_rows_beyond", "unique"),
    "shards and bags": ("shards", "bags", "pooled"),
}
"""Beginnings of the names of work terms that a kind has a factor of, in both directions."""

FACTOR = re.compile(
    rf"(forward|backward|launches|exchanges|{'|'.join(TERMS)}) x (\d+(?:\.\d+)?)", re.ASCII
)


def factors_of(kind: str) -> dict[str, float]:
    """Return the factors of a kind of hardware by part.

    Raises:
        ConfigError: the text has something else than factors.
    """
    factors: dict[str, float] = {}
    for text in kind.split(", "):
        if (found := FACTOR.fullmatch(text)) is None:
            raise ConfigError(f"{text!r} is no factor of prices; one is 'rows from memory x 6'")
        factors[found[1]] = float(found[2])
    return factors


def true_prices(packaged: LearnedCostModel, kind: str) -> LearnedCostModel:
    """Return the prices of a kind of hardware, see `factors_of`."""
    factors = factors_of(kind)
    names = packaged.compute.device.terms
    of_terms = np.ones(packaged.compute.num_parts)
    for part, beginnings in TERMS.items():
        is_part = [name.startswith(beginnings) for name in names]
        of_terms[: len(names)][is_part] *= factors.get(part, 1.0)
    directions = [factors.get(part, 1.0) * of_terms for part in ("forward", "backward")]
    if "launches" in factors:
        for of_parts in directions:
            of_parts[len(names) : len(names) + 2] = factors["launches"]
    exchanges = dict.fromkeys(EXCHANGES, factors.get("exchanges", 1.0))
    return dataclasses.replace(
        packaged,
        compute=packaged.compute.scaled(*directions),
        communication=packaged.communication.scaled(exchanges),
        standing=None,
    )


class MadeUpBench:
    """Measures plans on made-up hardware, by a clock of its own."""

    def __init__(self, true: LearnedCostModel, seed: int) -> None:
        self._true = true
        self._rng = np.random.default_rng(seed)

    def first_run(self, tables: Sequence[Table], batch_size: int) -> list[Sample]:
        """Return what a first run measures."""
        samples: list[Sample] = []
        now_s = 0.0
        while now_s < MEASURING_SHARE * FIRST_RUN_S:
            plan = draw_plan(
                len(samples),
                np.random.default_rng([0, len(samples)]),
                LIMITS,
                batch_sizes=(batch_size, batch_size // 4),
                computing=NUM_COMPUTING,
                exchanging=(NUM_RANKS,),
                tables=tables,
            )
            sample, took_s = self.measure(plan, len(samples))
            samples.append(sample)
            now_s += took_s
        return samples

    def measure(self, drawn: DrawnPlan, number: int) -> tuple[Sample, float]:
        """Return a measured plan, and the time that this takes, in s."""
        plan, task = drawn.as_plan("cpu", NUM_RANKS)
        cost = self._true.predict_trial(workload_of_plan(plan, task))
        noisy = cost.with_stages(
            {
                stage: [self._noisy(rank.stage_ms(stage)) for rank in cost.per_rank]
                for stage in STAGES
            }
        )
        ids_ms = tuple(self._noisy(ms) for ms in cost.input_dist_ms or ())
        num_ids = task.batch_size * sum(table.pooling_factor for table in task.tables)
        once_s = (cost.critical_path_ms + max(ids_ms)) / 1e3
        timed_s = max(min(ITERATIONS * once_s, ITERATIONS_S), 4 * once_s)
        noisy = dataclasses.replace(noisy, input_dist_ms=ids_ms)
        sample = Sample.of_plan(plan, task, noisy, kind=drawn.kind, number=number)
        return sample, SAMPLE_S + ID_S * num_ids / drawn.world_size + timed_s

    def _noisy(self, time_ms: float) -> float:
        return time_ms * math.exp(NOISE * self._rng.standard_normal())
