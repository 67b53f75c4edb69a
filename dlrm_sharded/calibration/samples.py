"""Measured plans: the shards of each rank, and what they cost on some hardware."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from dlrm_sharded.cost.exchange_terms import Hosts
from dlrm_sharded.cost.workload import Workload, workload_of_plan
from dlrm_sharded.files.errors import DataError, shortened
from dlrm_sharded.files.json_forms import read_form
from dlrm_sharded.plans.layouts import REPLICA_GROUP
from dlrm_sharded.plans.plan import ShardingPlan
from dlrm_sharded.plans.plan_cost import INPUT_DIST, STAGES, PlanCost
from dlrm_sharded.plans.tables import (
    HISTOGRAM_SLACK,
    MAX_COLUMNS,
    MAX_FEATURES,
    MAX_POOLING_FACTOR,
    MAX_ROWS,
    NUM_REUSE_BINS,
)
from dlrm_sharded.plans.task import MAX_BATCH_SIZE, MAX_RANKS, ShardingTask

TIMES = (INPUT_DIST, *STAGES)
"""Names of all measured times: the redistribution of ids, and the stages."""

RUN, COMPUTATION, COMMUNICATION = "run", "computation", "communication"
"""Kinds of samples: the plan of a run, a plan that was drawn, and one of tiny tables."""

MIN_STAGE_MS, MAX_STAGE_MS = 1e-6, 3.6e6
"""Limits of a stage's time, unless it is 0: a nanosecond and an hour."""

MAX_BYTES_PER_MS = 1e12
"""Limit of the bytes that any hardware reads in a ms: 1 PB/s.

The first-level caches of a large GPU of 2025 deliver 0.04 PB/s together.
"""

MAX_COUNT = 2**62

MAX_NOISE = 100.0
"""Limit of a time's noise, at which nothing is known about the time."""


@dataclass(frozen=True, slots=True)
class MeasuredShard:
    """One shard of a measured plan.

    Args:
        pooling_factor: mean ids per sample that reach this shard; for a block of rows or a replica,
            a fraction of its table's.
        reuse_histogram: histogram of the ids that reach this shard, see `Table.reuse_histogram`.
        row_wise: whether the shard is a block of rows, which has its own lookup.
        replicated: whether the shard is a replica; older files have none.
        pooled: see `Table.pooled`; older files have only pooled tables.
        module: number of the shard's module within its plan, see `Workload.owner`; older files lack
            it, so that bags count as one module, and sequences as another.
        num_features: see `Table.num_features`; older files lack it, and count as one.
    """

    rank: int
    num_rows: int
    num_cols: int
    pooling_factor: float
    reuse_histogram: tuple[float, ...]
    row_wise: bool
    replicated: bool = False
    pooled: bool = True
    module: int = 0
    num_features: int = 1

    def group_size(self, world_size: int) -> int:
        """Return the `group_size` of the shard's layout."""
        if self.replicated:
            return REPLICA_GROUP
        return world_size if self.row_wise else 1


@dataclass(frozen=True, slots=True)
class Sample:
    """A plan and its cost as measured by `measure`.

    Args:
        kind: one of `RUN`, `COMPUTATION` and `COMMUNICATION`.
        number: number of the plan among those that were drawn with it.
        cost: measured cost, with the redistribution of ids.
        noise: standard deviation of the logarithms of the times that other work causes, see
            `disturbance.Disturbance`.
    """

    kind: str
    number: int
    world_size: int
    ranks_per_host: int
    batch_size: int
    shards: tuple[MeasuredShard, ...]
    cost: PlanCost
    noise: float = 0.0

    @classmethod
    def of_plan(
        cls, plan: ShardingPlan, task: ShardingTask, cost: PlanCost, *, kind: str, number: int = 0
    ) -> Sample:
        """Return a measured plan of a task whose tables have profiles.

        Its row blocks are on all ranks; samples cannot express others.
        """
        workload = workload_of_plan(plan, task)
        tables = {table.name: table for table in task.tables}
        shards = [
            MeasuredShard(
                rank=shard.rank,
                num_rows=shard.num_rows,
                num_cols=shard.num_cols,
                pooling_factor=float(num_ids) / task.batch_size,
                # fewer digits take less of a line in the store
                reuse_histogram=tuple(np.round(histogram, 6).tolist()),
                row_wise=bool(size > 1),
                replicated=shard.replicated,
                pooled=tables[shard.table].pooled,
                module=int(module),
                num_features=tables[shard.table].num_features,
            )
            for shard, num_ids, histogram, size, module in zip(
                plan.shards,
                workload.num_ids,
                workload.reuse_histogram,
                workload.group_size,
                workload.owner,
                strict=True,
            )
        ]
        return cls(
            kind=kind,
            number=number,
            world_size=plan.world_size,
            ranks_per_host=task.topology.ranks_per_host,
            batch_size=task.batch_size,
            shards=tuple(shards),
            cost=cost,
        )

    @property
    def hosts(self) -> Hosts:
        """How the ranks lay on hosts."""
        return Hosts(self.world_size, self.ranks_per_host)

    def to_row(self) -> dict[str, Any]:
        """Return one row of the file."""
        assert self.cost.input_dist_ms is not None, "a measured cost has the redistribution of ids"
        return {
            "kind": self.kind,
            "number": self.number,
            "world_size": self.world_size,
            "ranks_per_host": self.ranks_per_host,
            "batch_size": self.batch_size,
            "shards": [dataclasses.asdict(shard) for shard in self.shards],
            "per_rank": [
                {"input_dist_ms": input_dist_ms, **stages.to_json()}
                for input_dist_ms, stages in zip(
                    self.cost.input_dist_ms, self.cost.per_rank, strict=True
                )
            ],
            **({"noise": self.noise} if self.noise else {}),
        }

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> Sample:
        """Read what `to_row` returned.

        Raises:
            DataError: a value is missing, or has another type.
        """
        own = dict(row) | {"noise": row.get("noise") or 0.0}  # which earlier collections lack
        try:
            times = [{name: rank[f"{name}_ms"] for name in TIMES} for rank in row["per_rank"]]
        except (LookupError, TypeError) as error:
            raise DataError(f"the times of the ranks are damaged ({error!r})") from error
        cost = {
            "input_dist_ms": [rank.pop(INPUT_DIST) for rank in times],
            "per_rank": [{f"{stage}_ms": ms for stage, ms in rank.items()} for rank in times],
        }
        # 0.2 wrote further values
        return read_form(own | {"cost": cost}, cls, name="the sample", may_have_others=True)


def sound_sample(row: Mapping[str, Any]) -> Sample:
    """Read what `to_row` returned; raise DataError if no measurement gives it."""
    sample = Sample.from_row(row)
    if problem := problem_of(sample):
        raise DataError(problem)
    return sample


def problem_of(sample: Sample) -> str | None:
    """Say why no measurement gives a sample, in a few words; None if one may."""
    return next(_problems(sample), None)


def _problems(sample: Sample) -> Iterator[str]:
    """Yield what is wrong; each check relies on those before it."""
    yield from _outside("number", sample.number, 0, MAX_COUNT)
    yield from _outside("batch_size", sample.batch_size, 1, MAX_BATCH_SIZE)
    yield from _outside("world_size", sample.world_size, 1, MAX_RANKS)
    yield from _outside("ranks_per_host", sample.ranks_per_host, 1, sample.world_size)
    if sample.world_size % sample.ranks_per_host:
        yield f"ranks_per_host {sample.ranks_per_host} does not divide {sample.world_size} ranks"
    if len(sample.cost.per_rank) != sample.world_size:
        yield f"times of {len(sample.cost.per_rank)} ranks, expected {sample.world_size}"
    yield from _outside("noise", sample.noise, 0, MAX_NOISE)
    if not sample.shards:
        yield "no shards"
    for shard in sample.shards:
        yield from _shard_problems(shard, sample.world_size)
        yield from _outside("module of a shard", shard.module, 0, len(sample.shards) - 1)
    assert sample.cost.input_dist_ms is not None
    read_bytes = [0.0] * sample.world_size
    for shard in sample.shards:
        num_ids = sample.batch_size * shard.pooling_factor
        read_bytes[shard.rank] += 4 * shard.num_cols * num_ids if num_ids >= 1 else 0.0
    for rank, stages in enumerate(sample.cost.per_rank):
        times_ms = {stage: getattr(stages, f"{stage}_ms") for stage in STAGES}
        times_ms[INPUT_DIST] = sample.cost.input_dist_ms[rank]
        for name, time_ms in times_ms.items():
            yield from _outside(f"{name} on rank {rank} in ms", time_ms, 0, MAX_STAGE_MS)
            if 0 < time_ms < MIN_STAGE_MS:
                yield f"{name} of {time_ms:.3g} ms on rank {rank}, less than any clock shows"
        if stages.computation_ms * MAX_BYTES_PER_MS < read_bytes[rank]:
            yield (
                f"computation of {stages.computation_ms:.3g} ms on rank {rank}, in which no "
                f"hardware reads {read_bytes[rank]:.3g} B"
            )


def _shard_problems(shard: MeasuredShard, world_size: int) -> Iterator[str]:
    yield from _outside("the rank of a shard", shard.rank, 0, world_size - 1)
    yield from _outside("num_rows of a shard", shard.num_rows, 1, MAX_ROWS)
    yield from _outside("num_cols of a shard", shard.num_cols, 1, MAX_COLUMNS)
    yield from _outside("pooling_factor of a shard", shard.pooling_factor, 0, MAX_POOLING_FACTOR)
    yield from _outside("num_features of a shard", shard.num_features, 1, MAX_FEATURES)
    if len(shard.reuse_histogram) != NUM_REUSE_BINS:
        yield f"reuse_histogram of {len(shard.reuse_histogram)} bins, expected {NUM_REUSE_BINS}"
    for share in shard.reuse_histogram:
        yield from _outside("a share of reuse_histogram", share, 0, 1.0 + HISTOGRAM_SLACK)
    # a table without a profile has zeros
    total = sum(shard.reuse_histogram)
    if total != 0 and abs(total - 1) > HISTOGRAM_SLACK:
        yield f"reuse_histogram sums to {total:.3g}, expected 1"


def _outside(key: str, value: float, least: float, most: float) -> Iterator[str]:
    """Yield what is wrong with a number that is not in a range; NaN is in none."""
    if not least <= value <= most:
        yield f"{key} is {shortened(value)}, expected {least:,} to {most:,}"


def workload_of_sample(sample: Sample) -> Workload:
    """Return the shards of a measured plan in the form that cost models predict."""
    shards, size = sample.shards, sample.world_size
    is_sequence = np.array([not shard.pooled for shard in shards])
    return Workload(
        world_size=size,
        ranks_per_host=sample.ranks_per_host,
        batch_size=sample.batch_size,
        rank=np.array([shard.rank for shard in shards]),
        group_size=np.array([shard.group_size(size) for shard in shards]),
        num_rows=np.array([float(shard.num_rows) for shard in shards]),
        num_cols=np.array([float(shard.num_cols) for shard in shards]),
        num_ids=np.array([sample.batch_size * shard.pooling_factor for shard in shards]),
        reuse_histogram=np.array([shard.reuse_histogram for shard in shards]),
        is_half=np.zeros(len(shards), dtype=bool),
        num_features=np.array([float(shard.num_features) for shard in shards]),
        is_sequence=is_sequence,
        # bags and sequences are never in one module, even if no module is noted
        owner=2 * np.array([shard.module for shard in shards]) + is_sequence,
    )
