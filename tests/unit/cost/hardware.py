"""Synthetic hardware: formulas for what plans cost on it, and random plans "measured" there.

Written from the shards' numbers alone, with nothing of the models that are fitted to it.

Letters: W ranks.
"""

import math
from collections.abc import Sequence

import numpy as np

from dlrm_sharded.accesses.patterns import ZipfAccesses
from dlrm_sharded.calibration.plan_limits import PlanLimits
from dlrm_sharded.calibration.random_plans import draw_communication, draw_computation
from dlrm_sharded.calibration.samples import MeasuredShard, Sample
from dlrm_sharded.measuring.drawn_table import DrawnTable
from dlrm_sharded.plans.layouts import row_blocks
from dlrm_sharded.plans.plan_cost import STAGES, PlanCost
from dlrm_sharded.plans.tables import NUM_REUSE_BINS

NOISE = 0.02
BATCH_SIZES = (1024, 2048, 4096, 8192)
LIMITS = PlanLimits(table_bytes=2 * 10**9, ids_per_step=600_000)

LAUNCH_MS, SHARD_MS = 0.03, 0.004
BAG_NS, HIT_NS, MISS_NS, UPDATE_NS = 2.0, 1.5, 12.0, 20.0
"""Per cache line of 64 B."""
CACHE_MB = 16.0

LATENCY_MS = 0.02
INTRA_BYTES_PER_MS, INTER_BYTES_PER_MS = 150e6, 12e6
OWN_SHARE, FULLEST_SHARE = 0.3, 0.7
REDUCE_MS = 0.03

MANIFEST = {
    "hardware": "synthetic",
    "device": "cpu",
    "cores": 2,
    "threads": 1,
    "versions": {},
    "commit": None,
    "optimizer": "rowwise_adagrad",
    "repeatability": {},
    "load_average": {"before": [0.0] * 3, "after": [0.0] * 3},
}


def compute_ms(shards: Sequence[MeasuredShard], batch_size: int) -> tuple[float, float]:
    """Forward and backward of one rank."""
    unique = [unique_ids(shard, batch_size) for shard in shards]
    read_mb = sum(4e-6 * n * shard.num_cols for n, shard in zip(unique, shards, strict=True))
    penalty = 1.0 + 1.5 * read_mb / (read_mb + CACHE_MB)
    launch_ms = LAUNCH_MS * len({shard.row_wise for shard in shards})
    forward, backward = launch_ms, 2 * launch_ms
    for n, shard in zip(unique, shards, strict=True):
        lines = math.ceil(shard.num_cols / 16)
        pages = 0.5 + 0.1 * math.log10(shard.num_rows)
        hits_ns = batch_size * BAG_NS + batch_size * shard.pooling_factor * HIT_NS
        forward += SHARD_MS + 1e-6 * lines * (hits_ns + n * MISS_NS * pages * penalty)
        backward += SHARD_MS + 1e-6 * lines * (1.5 * hits_ns + n * UPDATE_NS * pages * penalty)
    return forward, backward


def unique_ids(shard: MeasuredShard, batch_size: int) -> float:
    """Rows that one step reads, the uses of a bin taken at its middle."""
    uses = [1.0, 2.0, *(1.5 * 2.0 ** (i - 1) for i in range(2, NUM_REUSE_BINS))]
    mean = sum(share * use for share, use in zip(shard.reuse_histogram, uses, strict=True))
    return min(batch_size * shard.pooling_factor / mean, shard.num_rows)


def all_to_all_ms(volume: np.ndarray, ranks_per_host: int) -> np.ndarray:
    """[W], of the bytes that each rank exchanges with every other one [W].

    A rank's ports for both directions are busy for as long as its bytes take within the host, then
    between hosts; it waits for its own busier port, and for the busiest port of all.
    """
    world_size = len(volume)
    of_host = np.repeat(volume.reshape(-1, ranks_per_host).sum(axis=1), ranks_per_host)
    one_way = (
        volume * (ranks_per_host - 1) / INTRA_BYTES_PER_MS
        + volume * (world_size - ranks_per_host) / INTER_BYTES_PER_MS
    )
    other_way = (of_host - volume) / INTRA_BYTES_PER_MS
    other_way += (volume.sum() - of_host) / INTER_BYTES_PER_MS
    busier = np.maximum(one_way, other_way)
    latency_ms = LATENCY_MS * (1.0 + math.log2(world_size))
    return latency_ms + OWN_SHARE * busier + FULLEST_SHARE * busier.max()


def exchange_ms(shards: Sequence[MeasuredShard], num_bytes: np.ndarray, world_size: int):
    """[W], of the bytes that each shard exchanges with every rank of one host."""
    if world_size == 1:
        return np.zeros(1)
    by_row = np.array([shard.row_wise for shard in shards])
    times = np.zeros(world_size)
    if not by_row.all():
        ranks = np.array([shard.rank for shard in shards])
        of_columns = np.where(by_row, 0.0, num_bytes)
        volume = np.bincount(ranks, weights=of_columns, minlength=world_size)
        times += all_to_all_ms(volume, world_size)
    if by_row.any():
        of_rank = num_bytes[by_row].sum() / world_size
        times += REDUCE_MS + of_rank * (world_size - 1) / INTRA_BYTES_PER_MS
    return times


def measured_plans(
    num_computation: int, num_communication: int, *, seed: int, noise: float = NOISE
) -> tuple[Sample, ...]:
    """Random plans as they are collected, with the times of this hardware.

    Computation on 2 ranks, communication on 2 and 4 in turn.
    """
    kinds = ["computation"] * num_computation + ["communication"] * num_communication
    samples = []
    for number, kind in enumerate(kinds):
        rng = np.random.default_rng([seed, number])
        batch_size = int(rng.choice(BATCH_SIZES))
        world_size = 2 if kind == "computation" else 2 + 2 * (number % 2)
        draw = draw_computation if kind == "computation" else draw_communication
        drawn = draw(rng, world_size=world_size, batch_size=batch_size, limits=LIMITS)
        shards = [shard for table in drawn for shard in shards_of(table, world_size, batch_size)]
        samples.append(measure(kind, number, world_size, batch_size, shards, rng, noise))
    return tuple(samples)


def shards_of(table: DrawnTable, world_size: int, batch_size: int) -> list[MeasuredShard]:
    ranks = range(world_size) if table.rank is None else [table.rank]
    num_ids, accesses = batch_size * table.pooling_factor, table.accesses
    if isinstance(accesses, ZipfAccesses):
        histogram = reuse_histogram(table.num_rows, accesses.exponent, num_ids)
    else:
        distribution = accesses.distribution(table.num_rows, num_ids)
        histogram = distribution.expected_reuse_histogram(num_ids)
    return [
        MeasuredShard(
            rank=rank,
            num_rows=stop - start,
            num_cols=table.num_cols,
            pooling_factor=table.pooling_factor * (stop - start) / table.num_rows,
            reuse_histogram=histogram,
            row_wise=table.rank is None,
        )
        for rank, (start, stop) in zip(ranks, row_blocks(table.num_rows, len(ranks)), strict=True)
    ]


def reuse_histogram(num_rows: int, alpha: float, num_ids: float) -> tuple[float, ...]:
    """Of a Zipf distribution, roughly and fast: the rows of a range are used equally often."""
    edges = np.unique(np.geomspace(1, num_rows + 1, 40).round())
    num_in_range = np.diff(edges)
    mass = num_in_range * ((edges[:-1] + edges[1:]) / 2) ** -alpha
    uses = num_ids * mass / mass.sum() / num_in_range
    used = num_in_range * -np.expm1(-uses)
    bins = np.ceil(np.log2(np.maximum(uses, 1.0))).clip(max=NUM_REUSE_BINS - 1).astype(int)
    shares = np.bincount(bins, weights=used, minlength=NUM_REUSE_BINS)
    return tuple((shares / shares.sum()).tolist())


def measure(
    kind: str,
    number: int,
    world_size: int,
    batch_size: int,
    shards: Sequence[MeasuredShard],
    rng: np.random.Generator,
    noise: float,
) -> Sample:
    by_rank = [[shard for shard in shards if shard.rank == rank] for rank in range(world_size)]
    computing = np.array([compute_ms(of_rank, batch_size) for of_rank in by_rank])
    pooled = np.array([4.0 * batch_size * shard.num_cols / world_size for shard in shards])
    ids = np.array([4.0 * batch_size * (shard.pooling_factor + 1) / world_size for shard in shards])
    forward = exchange_ms(shards, pooled, world_size)
    times = np.array([computing[:, 0], forward, 1.1 * forward, computing[:, 1]]).T
    times *= np.exp(noise * rng.standard_normal(times.shape))
    input_dist = exchange_ms(shards, ids, world_size)
    input_dist *= np.exp(noise * rng.standard_normal(world_size))
    stages = dict(zip(STAGES, times.T.tolist(), strict=True))
    return Sample(
        kind=kind,
        number=number,
        world_size=world_size,
        ranks_per_host=world_size,
        batch_size=batch_size,
        shards=tuple(shards),
        cost=PlanCost.from_stages(stages, input_dist_ms=input_dist.tolist()),
    )
