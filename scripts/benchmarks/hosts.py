"""The gain of knowing which ranks share a host, for several bandwidths between hosts.

Three plans for the same tables are priced on the real hosts. The first plan is made for these
hosts, the second as if every rank were a host, and the third as if all ranks shared one host.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence

import numpy as np

from benchmarks.compared import OTHER_SETTINGS, cost_of, markdown, planner_of, quiet
from dlrm_sharded.accesses.profiles import with_profiles
from dlrm_sharded.datasets.presets import dlrm_datasets_pool, draw_tables
from dlrm_sharded.datasets.task_sets import PAPER_BATCH_SIZE
from dlrm_sharded.plans.layouts import is_row_wise
from dlrm_sharded.plans.plan import ShardingPlan
from dlrm_sharded.plans.tables import Table
from dlrm_sharded.plans.task import GIB, ShardingTask, Topology
from dlrm_sharded.plans.validation import validate
from dlrm_sharded.sharders.planning import Planner

ROOMY_BYTES = 32 * GIB


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tables", type=int, default=200)
    parser.add_argument("--hosts", type=int, default=16)
    parser.add_argument("--ranks-per-host", type=int, default=4)
    parser.add_argument(
        "--seeds", type=int, default=3, help="number of draws of tables [%(default)s]"
    )
    parser.add_argument(
        "--gb-per-s",
        type=float,
        nargs="+",
        default=[1, 3, 10, 25],
        help="bandwidths of one rank to other hosts",
    )
    parser.add_argument(
        "--sharder",
        default="neuroshard",
        help=f"sharder: a yaml of conf/sharder; {OTHER_SETTINGS}",
    )


def run(options: argparse.Namespace) -> None:
    quiet()
    planner = planner_of(options.sharder)
    pool = dlrm_datasets_pool()
    draws = [draw_tables(pool, num_tables=options.tables, seed=i) for i in range(options.seeds)]
    lines = []
    for gb_per_s in options.gb_per_s:
        costs, layouts = [], Counter[str]()
        for tables in draws:
            hosts, *others = _tasks(tables, gb_per_s, options)
            informed, _ = planner.plan(hosts)
            layouts.update(_layouts(informed, hosts))
            plans = [informed, *(planner.plan(other)[0] for other in others)]
            costs.append([_cost_ms(planner, plan, hosts) for plan in plans])
        lines.append([f"{gb_per_s:g}", *_cells(np.array(costs)), *_means(layouts, len(draws))])
    header = [
        "GB/s between hosts",
        "cost, ms",
        "over that with every rank a host",
        "over that with all ranks on one",
        "tables in columns, rows, rows of a host",
    ]
    print(f"{options.sharder}; means of {options.seeds} draws of {options.tables} tables, and each")
    print(markdown(header, lines))


def _tasks(
    tables: Sequence[Table], gb_per_s: float, options: argparse.Namespace
) -> list[ShardingTask]:
    """Return the task with its real hosts, with every rank a host, and with all ranks on one."""
    world_size = options.hosts * options.ranks_per_host
    return [
        with_profiles(
            ShardingTask(
                tuple(tables),
                Topology(
                    world_size,
                    ROOMY_BYTES,
                    local_world_size=local_world_size,
                    compute_device="cpu",
                    intra_host_bytes_per_s=None if local_world_size is None else 1e11,
                    inter_host_bytes_per_s=None if local_world_size is None else 1e9 * gb_per_s,
                ),
                PAPER_BATCH_SIZE,
            )
        )
        for local_world_size in (options.ranks_per_host, 1, None)
    ]


def _cost_ms(planner: Planner, plan: ShardingPlan, task: ShardingTask) -> float:
    validate(plan, task)
    return cost_of(planner, plan, task).cost_ms


def _cells(costs: np.ndarray) -> list[str]:
    """Return the first plan's mean cost and its ratios to the others, from costs [seeds, plans]."""
    cells = [f"{costs[:, 0].mean():.1f}"]
    for others in costs[:, 1:].T:
        ratios = costs[:, 0] / others
        all_ratios = ", ".join(f"{ratio:.3f}" for ratio in ratios)
        cells.append(f"{ratios.mean():.3f} ({all_ratios})")
    return cells


def _layouts(plan: ShardingPlan, task: ShardingTask) -> Counter[str]:
    """Count the split tables by the way they are split."""
    shards_by_table = plan.shards_by_table()
    num_tables = Counter[str]()
    for table in task.tables:
        shards = shards_by_table[table.name]
        if is_row_wise(shards, table):
            num_tables["rows" if len(shards) == plan.world_size else "host_rows"] += 1
        elif len(shards) > 1:
            num_tables["columns"] += 1
    return num_tables


def _means(layouts: Counter[str], num: int) -> list[str]:
    return [", ".join(f"{layouts[key] / num:.1f}" for key in ("columns", "rows", "host_rows"))]
