"""Evaluations per second of moves and swaps by the learned cost model, on one core."""

from __future__ import annotations

import argparse
import time

import numpy as np

from dlrm_sharded.cost.candidates import Placement
from dlrm_sharded.cost.features import workload_of_plan
from dlrm_sharded.cost.learned import learned_cost_model, with_profiles
from dlrm_sharded.cost.types import TOTALS
from dlrm_sharded.data.presets import dlrm_datasets_pool, draw_tables
from dlrm_sharded.sharders.heuristics import GreedySharder
from dlrm_sharded.task import GIB, ShardingTask, Topology


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tables", type=int, default=50)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--batch", type=int, default=400, help="candidates at once")
    parser.add_argument("--seconds", type=float, default=3.0)


def run(options: argparse.Namespace) -> None:
    model = learned_cost_model(hardware=None, device="cpu")
    tables = draw_tables(dlrm_datasets_pool(), num_tables=options.tables, seed=0)
    topology = Topology(options.ranks, memory_bytes=200 * GIB)
    task = with_profiles(ShardingTask(tables, topology, batch_size=65_536))
    plan = GreedySharder("dim").shard(task)
    workload = workload_of_plan(plan, task)
    rng = np.random.default_rng(0)
    print(f"{options.tables} tables, {options.ranks} ranks, {options.batch} candidates at once")
    for objective in TOTALS:
        placement = Placement(
            model,
            model.hosts(topology),
            batch_size=task.batch_size,
            vectors=model.compute.vectors(workload),
            num_cols=workload.num_cols,
            rank=workload.rank,
            objective=objective,
        )
        for name, evaluate, num_others in (
            ("moves", placement.after_moves, options.ranks),
            ("swaps", placement.after_swaps, options.tables),
        ):
            batches = [
                tuple(rng.integers(0, end, options.batch) for end in (options.tables, num_others))
                for _ in range(20)
            ]
            started, num_done = time.perf_counter(), 0
            while time.perf_counter() - started < options.seconds:
                evaluate(*batches[num_done % len(batches)])
                num_done += 1
            rate = num_done * options.batch / (time.perf_counter() - started)
            print(f"{objective:14} {name}: {rate / 1e3:8,.0f} thousand candidates a second")
