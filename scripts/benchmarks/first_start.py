"""Plans by the packaged prices, after a first start, and after calibrations, on made-up hardware.

Each kind of hardware is the packaged model with other prices, so nothing is measured: a measurement
has the predicted time, with noise, and takes as long as it would. What a first start chooses in
20 s, and what a collection draws in two and in ten minutes, adapts the packaged prices. Plans of
other tasks are then judged by the true prices, and compared with the plans that these give.

On this machine, or on what switches of the libraries make of it, `elsewhere` measures the same.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from benchmarks.figures import interval_text
from benchmarks.planted_runs import Prices, journal_report, journal_rows
from dlrm_sharded.calibration.drawn_plans import plan_of_drawn
from dlrm_sharded.calibration.first_start import FIT_SHARE, Chooser, adapted_to, measure_plans
from dlrm_sharded.calibration.plan_sizes import CPU_SIZES
from dlrm_sharded.calibration.random_plans import draw_communication, draw_computation
from dlrm_sharded.calibration.schedule import KINDS
from dlrm_sharded.calibration.start_measurement import IDS_PER_STEP, TABLE_GIB
from dlrm_sharded.calibration.start_plans import StartPlan, start_plans
from dlrm_sharded.cost.communication import EXCHANGES
from dlrm_sharded.cost.learned import LearnedCostModel, shipped_prior
from dlrm_sharded.cost.workload import workload_of_plan
from dlrm_sharded.datasets.task_sets import measured_tasks
from dlrm_sharded.files.text_table import Column, TextTable
from dlrm_sharded.fitting.from_prior import adapted
from dlrm_sharded.fitting.picture import START_S
from dlrm_sharded.fitting.samples import Sample
from dlrm_sharded.hardware.context import RunContext
from dlrm_sharded.measuring.drawn_table import DrawnTable
from dlrm_sharded.plans.plan_cost import STAGES
from dlrm_sharded.plans.standing import Standing
from dlrm_sharded.plans.tables import Table
from dlrm_sharded.plans.task import Topology
from dlrm_sharded.sharders.base import SharderContext
from dlrm_sharded.sharders.neuroshard import NeuroShardSharder
from studies.parts import option
from studies.processes import quiet
from studies.study import Case, Row

BASIS = "predicted"
OPTIMIZER = "rowwise_adagrad"
NUM_RANKS, NUM_COMPUTING = 4, 2
"""Ranks of the tasks, and those that two cores let compute at once."""

START_SEED = 1000
"""Seed of the task of the first start, which is none of those that plans are compared on."""

CALIBRATIONS = {"two minutes": 120.0, "ten minutes": 600.0}
PRIOR_ERROR = 0.7
"""Stated error of the packaged prices on other hardware."""

NOISE = 0.05
"""Standard deviation of the logarithm of a made-up measurement."""

ITERATIONS, ITERATIONS_S, SAMPLE_S, ID_S = 22, 0.3, 0.15, 2e-7
"""A measurement takes this many iterations or seconds, and so long besides, also for each id."""


@dataclass(frozen=True, slots=True)
class Kind:
    """Hardware whose prices are the packaged ones times factors.

    Args:
        launches: of what launches take, in place of the direction's factor; None for that.
        terms: further factors of work terms whose names begin so, in both directions.
    """

    forward: float = 1.0
    backward: float = 1.0
    launches: float | None = None
    exchanges: float = 1.0
    terms: Mapping[str, float] = field(default_factory=dict)

    def applied(self, packaged: LearnedCostModel) -> LearnedCostModel:
        """Return the true prices."""
        names = packaged.compute.device.terms
        factors = []
        for direction in (self.forward, self.backward):
            of_parts = np.full(packaged.compute.num_parts, direction)
            for i, name in enumerate(names):
                of_parts[i] *= math.prod(
                    factor for begin, factor in self.terms.items() if name.startswith(begin)
                )
            if self.launches is not None:
                of_parts[len(names) : len(names) + 2] = self.launches
            factors.append(of_parts)
        return dataclasses.replace(
            packaged,
            compute=packaged.compute.scaled(*factors),
            communication=packaged.communication.scaled(dict.fromkeys(EXCHANGES, self.exchanges)),
        )


MADE_UP = {
    "backward x 5.5": Kind(backward=5.5),
    "forward x 2, backward x 5.5, launches x 4, exchanges x 3": Kind(2.0, 5.5, 4.0, 3.0),
    "launches x 10": Kind(launches=10.0),
    "exchanges x 6": Kind(exchanges=6.0),
    "columns x 3, backward x 2": Kind(1.0, 2.0, terms={"id_columns": 3.0, "id_lines": 3.0}),
    "rows from memory x 6": Kind(terms={"id_lines_of_rows_beyond": 6.0, "unique": 6.0}),
    "shards and bags x 10": Kind(terms={"shards": 10.0, "bags": 10.0, "pooled": 10.0}),
}
"""Kinds of made-up hardware."""

OPTIONS = {
    "tasks": option(4, "tasks to compare on"),
    "kinds": option((), "kinds of hardware; all by default", nargs="*"),
    "seed": option(0, "seed of tasks, plans and noise"),
    "journals": option(0, "1 compares after journals of runs, some of which are bad"),
}


def cases(options: argparse.Namespace) -> Iterator[Case]:
    for name in options.kinds or MADE_UP:
        rows = _journal_rows if options.journals else _rows
        yield Case(name, functools.partial(rows, options, name))


def _rows(options: argparse.Namespace, name: str) -> list[Row]:
    quiet()
    packaged = shipped_prior(RunContext())
    true = MADE_UP[name].applied(packaged)
    models = {"packaged": packaged}
    for title, samples in _measured(packaged, true, options.seed).items():
        models[title] = adapted(packaged, samples)
        print(f"{name}: {title}, {len(samples)} plans", flush=True)
    models["true"] = true
    rows: list[Row] = []
    for number, found in enumerate(measured_tasks(options.seed, num=options.tasks)):
        for title, model in models.items():
            plan = NeuroShardSharder(SharderContext(cost_model=model)).shard(found.task)
            rows.append(
                {
                    "kind": name,
                    "number": number,
                    "prices": title,
                    "cost_ms": true.predict(plan, found.task).cost_ms,
                    "predicted_ms": model.predict(plan, found.task).cost_ms,
                }
            )
    return rows


def _journal_rows(options: argparse.Namespace, name: str) -> list[Row]:
    """Return costs of plans after journals, beginning from all kinds of prices."""
    quiet()
    packaged = dataclasses.replace(
        shipped_prior(RunContext()), standing=Standing("prior", "packaged", error=PRIOR_ERROR)
    )
    true = MADE_UP[name].applied(packaged)
    started, calibrated = _measured(packaged, true, options.seed, ("two minutes",)).values()
    prices = {"packaged": Prices(packaged)}
    for title, samples in (("first start", started), ("two minutes", calibrated)):
        found, is_start = adapted_to(packaged, samples), samples is started
        standing = Standing(
            "measured" if is_start else "calibrated",
            title,
            error=found.stated_error if is_start else found.expected_error,
            rank_error=found.rank_error,
        )
        model = dataclasses.replace(adapted(packaged, samples), standing=standing)
        prices[title] = Prices(model, (packaged, samples) if is_start else None)
    rows = journal_rows(true, prices, seed=options.seed, num_tasks=options.tasks)
    return [{"kind": name} | row for row in rows]


def _measured(
    packaged: LearnedCostModel,
    true: LearnedCostModel,
    seed: int,
    calibrations: Iterable[str] = tuple(CALIBRATIONS),
) -> dict[str, list[Sample]]:
    """Return what a first start and calibrations measure, by their names."""
    [found] = measured_tasks(START_SEED + seed, num=1)
    bench = MadeUpBench(true, seed)
    start = bench.first_start(packaged, found.task.tables, found.task.batch_size)
    collected = {name: bench.collected(CALIBRATIONS[name]) for name in calibrations}
    return {f"first start ({START_S:.0f} s)": start, **collected}


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

    def collected(self, seconds: float) -> list[Sample]:
        """Return what a collection draws and measures in so many seconds."""
        limits = CPU_SIZES.rank_limits(OPTIMIZER)
        samples: list[Sample] = []
        ends_s = self._now_s + seconds
        while self._now_s < ends_s:
            kind = KINDS[len(samples) % len(KINDS)]
            size = NUM_RANKS if kind == "communication" else NUM_COMPUTING
            draw = draw_communication if kind == "communication" else draw_computation
            batch_size = int(self._rng.choice(CPU_SIZES.batch_sizes))
            drawn = draw(self._rng, world_size=size, batch_size=batch_size, limits=limits)
            samples.append(self.measure(drawn, batch_size, size, kind, len(samples)))
        return samples

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


def report(rows: Sequence[Row], reference: str | None) -> str:
    """Write errors of predictions and costs of plans over those of the true prices' plans."""
    if "journal" in rows[0]:
        return journal_report(rows)
    lines = []
    for kind in dict.fromkeys(row["kind"] for row in rows):
        of_kind = [row for row in rows if row["kind"] == kind]
        true = {row["number"]: row["cost_ms"] for row in of_kind if row["prices"] == "true"}
        for prices in dict.fromkeys(row["prices"] for row in of_kind):
            found = [row for row in of_kind if row["prices"] == prices]
            ratios = [row["cost_ms"] / true[row["number"]] for row in found]
            errors = [100 * abs(row["predicted_ms"] / row["cost_ms"] - 1) for row in found]
            lines.append(
                [kind, prices, float(np.mean(errors)), interval_text(ratios, ".3f"), max(ratios)]
            )
    columns: list[Column | str] = [
        *("hardware", "prices"),
        Column("error, %", ".1f"),
        *("over true [95 %]", Column("worst", ".3f")),
    ]
    table = TextTable(columns, lines).markdown()
    return f"the slowest rank by the true prices, means over tasks:\n\n{table}"
