"""Hardware that is made up: packaged prices times factors, and a bench that measures on it.

A measurement has the predicted time, with noise, and takes as long on a clock of its own as it
would, so that a first start learns there what it would learn in its time.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence

import numpy as np

from dlrm_sharded.calibration.drawn_plans import plan_of_drawn
from dlrm_sharded.calibration.first_start import FIT_SHARE, Chooser, measure_plans
from dlrm_sharded.calibration.hardware_costs import FIRST_RUN_S as START_S
from dlrm_sharded.calibration.plan_sizes import CPU_SIZES
from dlrm_sharded.calibration.random_plans import DrawnTable
from dlrm_sharded.calibration.samples import Sample
from dlrm_sharded.calibration.start_measurement import IDS_PER_STEP, TABLE_GIB
from dlrm_sharded.calibration.start_plans import StartPlan, start_plans
from dlrm_sharded.cost.communication import EXCHANGES
from dlrm_sharded.cost.learned import LearnedCostModel
from dlrm_sharded.cost.workload import workload_of_plan
from dlrm_sharded.files.errors import ConfigError
from dlrm_sharded.plans.plan_cost import STAGES
from dlrm_sharded.plans.tables import Table
from dlrm_sharded.plans.task import Topology

OPTIMIZER = "rowwise_adagrad"
NUM_RANKS, NUM_COMPUTING = 4, 2
"""Ranks that exchange, and those that two cores let compute at once."""

NOISE = 0.05
"""Standard deviation of the logarithm of a made-up measurement."""

ITERATIONS, ITERATIONS_S, SAMPLE_S, ID_S = 22, 0.3, 0.15, 2e-7
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
        self._now_s = 0.0

    def first_start(
        self, packaged: LearnedCostModel, tables: Sequence[Table], batch_size: int
    ) -> list[Sample]:
        """Return what a first start chooses and measures."""
        plans = start_plans(
            tables,
            batch_size,
            dataclasses.replace(
                CPU_SIZES, table_gib=TABLE_GIB["cpu"], ids_per_step=IDS_PER_STEP["cpu"]
            ).rank_limits(OPTIMIZER),
            computing=NUM_COMPUTING,
            exchanging=NUM_RANKS,
        )
        budget_s = (1.0 - FIT_SHARE) * START_S
        chooser = Chooser.of_plans(packaged, plans, budget_s=budget_s, ranks_per_host=NUM_RANKS)
        measured = measure_plans(
            plans,
            chooser,
            lambda plan, attempt: self.measure_start(plan),
            budget_s=START_S,
            decide=lambda choose: choose(),
            clock=self.clock,
        )
        return list(measured.samples)

    def clock(self) -> float:
        """Return the time, in s."""
        return self._now_s

    def measure_start(self, plan: StartPlan) -> Sample:
        """Return what measuring a plan of a first start finds."""
        return self.measure(plan.tables, plan.batch_size, plan.world_size, plan.kind, plan.number)

    def measure(
        self, drawn: Sequence[DrawnTable], batch_size: int, size: int, kind: str, number: int
    ) -> Sample:
        """Return a measured plan, and let the time pass that this takes."""
        topology = Topology(size, memory_bytes=1, compute_device="cpu")
        plan, task = plan_of_drawn(drawn, batch_size, topology)
        accesses = {f"t{i}": table.accesses.name for i, table in enumerate(drawn)}
        cost = self._true.predict_trial(workload_of_plan(plan, task))
        noisy = cost.with_stages(
            {
                stage: [self._noisy(rank.stage_ms(stage)) for rank in cost.per_rank]
                for stage in STAGES
            }
        )
        ids_ms = tuple(self._noisy(ms) for ms in cost.input_dist_ms or ())
        num_ids = batch_size * sum(table.pooling_factor for table in task.tables) / size
        once_s = (cost.critical_path_ms + max(ids_ms)) / 1e3
        self._now_s += SAMPLE_S + ID_S * num_ids
        self._now_s += max(min(ITERATIONS * once_s, ITERATIONS_S), 4 * once_s)
        noisy = dataclasses.replace(noisy, input_dist_ms=ids_ms)
        return Sample.of_plan(plan, task, noisy, kind=kind, number=number, accesses=accesses)

    def _noisy(self, time_ms: float) -> float:
        return time_ms * math.exp(NOISE * self._rng.standard_normal())
