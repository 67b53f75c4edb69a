"""The parts that benchmarks of measured shards have in common: options, bench, ids and rounds."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeVar

import numpy as np
import torch

from benchmarks.compared import quiet
from dlrm_sharded.calibration.measure import MeasureConfig
from dlrm_sharded.calibration.rank_bench import RankBench, TableIds, draw_ids
from dlrm_sharded.plans.plan import Shard
from dlrm_sharded.plans.plan_cost import NO_COST, StageCost
from dlrm_sharded.plans.task import ShardingTask
from dlrm_sharded.ranks.distributed import process_group

OPTIMIZER = "rowwise_adagrad"
NUM_BATCHES = 3

Key = TypeVar("Key")


def add_round_arguments(parser: argparse.ArgumentParser, *, rounds: int, item: str) -> None:
    """Add the options for how often each item, a rank or a piece, is measured."""
    parser.add_argument(
        "--rounds",
        type=int,
        default=rounds,
        help=f"rounds; each builds and measures every {item} anew [%(default)s]",
    )
    parser.add_argument(
        "--iterations",
        type=int,
        default=8,
        help=f"iterations of one {item} in one round [%(default)s]",
    )


@contextmanager
def open_bench(
    iterations: int, *, table_bytes: int, threads: int = 1
) -> Iterator[tuple[RankBench, torch.device]]:
    """Yield a bench and the device that it measures on: a GPU, or threads of the CPU."""
    quiet()
    torch.set_num_threads(threads)
    config = MeasureConfig(iterations=iterations, warmup=2, num_batches=NUM_BATCHES)
    with process_group() as rank:
        bench = RankBench(config, rank.device, table_bytes=table_bytes, optimizer=OPTIMIZER)
        yield bench, rank.device


def random_ids(task: ShardingTask, rng: np.random.Generator) -> TableIds:
    return draw_ids(
        task.tables,
        batch_size=task.batch_size,
        num_batches=NUM_BATCHES,
        seed=int(rng.integers(2**32)),
        num_ranks=task.topology.world_size,
    )


def interleaved(
    bench: RankBench,
    groups: Mapping[Key, Sequence[Shard]],
    ids: TableIds,
    *,
    rounds: int,
    rng: np.random.Generator,
) -> dict[Key, list[StageCost]]:
    """Measure every group of shards once in each round, in a new random order."""
    keys = list(groups)
    measured: dict[Key, list[StageCost]] = {key: [] for key in keys}
    for _ in range(rounds):
        for i in rng.permutation(len(keys)):
            shards = groups[keys[i]]
            measured[keys[i]].append(bench.measure(shards, ids) if shards else NO_COST)
    return measured
