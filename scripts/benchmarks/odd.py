"""Sharders on odd tasks: whether any finds a plan that neuroshard lacks, or a cheaper one.

Costs are those of the learned cost model, for CPUs or for the GPU that stands for all.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Iterator, Sequence

from benchmarks.planners import planner_of
from dlrm_sharded.cost.base import price
from dlrm_sharded.cost.bound import lower_bound_ms
from dlrm_sharded.datasets.odd_tasks import odd_task
from dlrm_sharded.files.errors import ShardingError
from dlrm_sharded.files.text_table import Column, TextTable
from dlrm_sharded.plans.validation import validate
from studies.parts import option
from studies.processes import quiet
from studies.study import Case, Row

BASIS = "predicted"
REFERENCE = "neuroshard"
TOLERANCE = 0.005
"""Relative difference up to which plans cost the same."""

OTHERS = (
    *("random", "size", "dim", "lookup", "size_lookup", "hugectr", "embark"),
    *("torchrec", "torchrec_dp", "torchrec_blind", "torchrec_calibrated"),
    *("autoshard", "dreamshard", "autoshard_portfolio", "dreamshard_portfolio"),
)
OPTIONS = {
    "first": option(0, "seed of the first task"),
    "num": option(1000, "number of tasks"),
    "sharders": option((REFERENCE, *OTHERS), "yamls of conf/sharder"),
}


def cases(options: argparse.Namespace) -> Iterator[Case]:
    for seed in range(options.first, options.first + options.num):
        yield Case(f"{seed}", functools.partial(_rows, seed, options.sharders))


def _rows(seed: int, sharders: Sequence[str]) -> list[Row]:
    quiet()
    task, rows = odd_task(seed), []
    for sharder in sharders:
        planner = planner_of(sharder, device=task.topology.compute_device)
        priced = price(planner.cost_model, task)
        assert priced is not None
        row: Row = {"seed": seed, "sharder": sharder, "cost_ms": None, "bound_ms": None}
        row |= {"num_tables": len(task.tables), "world_size": task.topology.world_size}
        begun_s = time.process_time()
        try:
            plan = planner.sharder.shard(priced.task)
            row["cpu_s"] = time.process_time() - begun_s
            validate(plan, priced.task)
        except ShardingError as error:
            row["error"] = str(error)
        else:
            row |= {"cost_ms": priced.predict(plan).cost_ms, "bound_ms": lower_bound_ms(priced)}
        rows.append(row)
    return rows


def report(rows: Sequence[Row], reference: str | None) -> str:
    """Write for each sharder how often its plan is cheaper, and the tasks where one is."""
    reference = reference or REFERENCE
    by_task: dict[int, dict[str, Row]] = {}
    for row in rows:
        by_task.setdefault(row["seed"], {})[row["sharder"]] = row
    costs = {
        seed: {sharder: row["cost_ms"] for sharder, row in of_task.items() if row["cost_ms"]}
        for seed, of_task in by_task.items()
    }
    lines, better = [], []
    for sharder in dict.fromkeys(row["sharder"] for row in rows):
        planned = [found for found in costs.values() if sharder in found]
        ratios = [f[reference] / f[sharder] for f in planned if reference in f]
        dearer = [ratio for ratio in ratios if ratio > 1 + TOLERANCE]
        lines.append(
            (sharder, len(planned), len(planned) - len(ratios), len(dearer), max(ratios, default=0))
        )
    for seed, found in costs.items():
        best = min(found, key=found.__getitem__, default=reference)
        if best not in found:
            continue
        ratio = found[reference] / found[best] if reference in found else None
        if ratio is None or ratio > 1 + TOLERANCE:
            row = by_task[seed][best]
            better.append((seed, row["num_tables"], row["world_size"], best, ratio))
    titles = ("sharder", "plans", f"without {reference}", "cheaper", Column("most", ".3f"))
    text = f"{len(costs)} tasks, {sum(map(bool, costs.values()))} with a plan.\n\n"
    text += TextTable(titles, lines).markdown()
    if better:
        titles = ("seed", "tables", "ranks", "best", Column("ratio", ".3f"))
        text += f"\n\n{len(better)} tasks with a cheaper plan:\n\n"
        text += TextTable(titles, better).markdown()
    return text
