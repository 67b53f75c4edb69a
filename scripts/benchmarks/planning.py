"""Time that the heuristics take to plan a large task."""

from __future__ import annotations

import argparse
import statistics
import time

from dlrm_sharded.datasets.presets import dlrm_datasets_pool, draw_tables
from dlrm_sharded.plans.task import GIB, ShardingTask, Topology
from dlrm_sharded.plans.validation import validate
from dlrm_sharded.sharders.base import Sharder
from dlrm_sharded.sharders.heuristics import WEIGHTS, GreedySharder, RandomSharder


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tables", type=int, default=1000)
    parser.add_argument("--ranks", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=7)


def run(options: argparse.Namespace) -> None:
    tables = draw_tables(dlrm_datasets_pool(), num_tables=options.tables, seed=0)
    task = ShardingTask(tables, Topology(options.ranks, memory_bytes=80 * GIB), batch_size=65_536)
    sharders: dict[str, Sharder] = {
        "random": RandomSharder(),
        **{w: GreedySharder(w) for w in WEIGHTS},
    }
    print(f"{options.tables} tables, {options.ranks} ranks; median of {options.repeats}")
    for name, sharder in sharders.items():
        solve_s = []
        for _ in range(options.repeats):
            started = time.perf_counter()
            plan = sharder.shard(task)
            solve_s.append(time.perf_counter() - started)
        validate(plan, task)
        print(f"{name:12} {1e3 * statistics.median(solve_s):8.1f} ms")
