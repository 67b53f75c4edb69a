"""Measured plans: the shards of each rank, and what they cost on some hardware."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dlrm_sharded.access_patterns import ZipfAccesses
from dlrm_sharded.artifact_kinds import CALIBRATE
from dlrm_sharded.cost.features import Workload, workload_of_rows
from dlrm_sharded.errors import DataError
from dlrm_sharded.hardware.hardware import Hardware
from dlrm_sharded.layouts import REPLICA_GROUP
from dlrm_sharded.plan_cost import INPUT_DIST, STAGES, PlanCost
from dlrm_sharded.tables import NUM_REUSE_BINS

TIMES = (INPUT_DIST, *STAGES)
"""Names of all measured times: the redistribution of ids, and the stages."""

CRITICAL_PATH = "critical_path"
"""Name of the sum of the stages on their slowest ranks, among measures of repeatability."""

_PLAIN_KEYS = ("kind", "number", "attempt", "world_size", "ranks_per_host", "batch_size")


@dataclass(frozen=True, slots=True)
class MeasuredShard:
    """One shard of a measured plan.

    Args:
        pooling_factor: mean ids per sample that reach this shard; for a block of rows or a replica,
            a fraction of its table's.
        reuse_histogram: histogram of the ids that reach this shard, see `Table.reuse_histogram`.
        row_wise: whether the shard is a block of rows, which has a lookup of its own.
        accesses: name of the table's access pattern; the only one was "zipf" once.
        replicated: whether the shard is a replica; there were none once.
    """

    rank: int
    num_rows: int
    num_cols: int
    pooling_factor: float
    reuse_histogram: tuple[float, ...]
    row_wise: bool
    accesses: str = ZipfAccesses.name
    replicated: bool = False

    def group_size(self, world_size: int) -> int:
        """Return the `group_size` of the shard's layout."""
        if self.replicated:
            return REPLICA_GROUP
        return world_size if self.row_wise else 1


@dataclass(frozen=True, slots=True)
class Sample:
    """A random plan and its cost as measured by `measure`.

    Args:
        kind: "computation" for tables of real sizes, "communication" for tiny ones.
        number: number of the plan within its collection.
        attempt: how often the plan had been measured before.
        cost: measured cost, with the redistribution of ids.
    """

    kind: str
    number: int
    attempt: int
    world_size: int
    ranks_per_host: int
    batch_size: int
    shards: tuple[MeasuredShard, ...]
    cost: PlanCost

    @property
    def has_replicas(self) -> bool:
        return any(shard.replicated for shard in self.shards)

    def to_row(self) -> dict[str, Any]:
        """Return one row of the file."""
        assert self.cost.input_dist_ms is not None, "a measured cost has the redistribution of ids"
        return {
            "kind": self.kind,
            "number": self.number,
            "attempt": self.attempt,
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
        }

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> Sample:
        """Read what `to_row` returned."""
        ranks = row["per_rank"]
        stages_ms = {stage: [rank[f"{stage}_ms"] for rank in ranks] for stage in STAGES}
        return cls(
            **{key: row[key] for key in _PLAIN_KEYS},
            shards=tuple(
                MeasuredShard(**{**shard, "reuse_histogram": tuple(shard["reuse_histogram"])})
                for shard in row["shards"]
            ),
            cost=PlanCost.from_stages(
                stages_ms, input_dist_ms=[float(rank["input_dist_ms"]) for rank in ranks]
            ),
        )


@dataclass(frozen=True, slots=True)
class CollectedCosts:
    """A collection: all its samples, and the manifest."""

    samples: tuple[Sample, ...]
    manifest: dict[str, Any]

    @property
    def hardware(self) -> Hardware:
        """Return the hardware that the plans were measured on.

        Raises:
            DataError: its entries in the manifest are damaged.
        """
        try:
            return Hardware.from_meta(self.manifest)
        except (LookupError, ValueError) as error:
            raise DataError(
                f"the manifest of the collected costs is damaged ({error}); collect again with "
                f"{CALIBRATE}"
            ) from error

    def first_attempts(self, kind: str) -> list[Sample]:
        """Return the first measurement of every plan of a kind."""
        return [s for s in self.samples if s.kind == kind and s.attempt == 0]


def check_sample(sample: Sample, path: Path) -> None:
    """Raise DataError or TypeError if no measurement gives the sample."""
    where = f"{path}: {sample.kind} sample {sample.number}"
    ranks = len(sample.cost.per_rank)
    if ranks != sample.world_size or not all(0 <= shard.rank < ranks for shard in sample.shards):
        raise DataError(
            f"{where} has shards or times of ranks outside its world; the file is damaged, collect "
            f"again with {CALIBRATE}"
        )
    if not sample.shards or not all(_is_possible(shard) for shard in sample.shards):
        raise DataError(
            f"{where} has no shards, or impossible ones; the file is damaged, collect "
            f"again with {CALIBRATE}"
        )
    assert sample.cost.input_dist_ms is not None
    for rank, stages in enumerate(sample.cost.per_rank):
        times = {stage: stages.stage_ms(stage) for stage in STAGES}
        times[INPUT_DIST] = sample.cost.input_dist_ms[rank]
        for name, time_ms in times.items():
            if not (math.isfinite(time_ms) and time_ms >= 0):
                raise DataError(
                    f"{where} has {name} of {time_ms} ms on rank {rank}; a time is a finite number "
                    f"from 0; the file is damaged, collect again with {CALIBRATE}"
                )


def _is_possible(shard: MeasuredShard) -> bool:
    numbers = (shard.pooling_factor, *shard.reuse_histogram)
    return (
        min(shard.num_rows, shard.num_cols) > 0
        and isinstance(shard.accesses, str)
        and len(shard.reuse_histogram) == NUM_REUSE_BINS
        and all(math.isfinite(number) and number >= 0 for number in numbers)
    )


def repeatability(samples: Iterable[Sample]) -> dict[str, dict[str, float]]:
    """Return how far the second measurements of plans are from the first, by kind and ranks.

    Returns:
        Mean absolute difference of the slowest rank's time, in percent of the first, for each of
        `TIMES`, and that of `critical_path`; and the number of plans in `num`.
    """
    pairs: dict[tuple[str, int], dict[int, Sample]] = {}
    for sample in samples:
        pairs.setdefault((sample.kind, sample.number), {})[sample.attempt] = sample
    errors: dict[str, list[list[float]]] = {}
    for (kind, _), attempts in pairs.items():
        if len(attempts) > 1:
            first, second = attempts[0], attempts[1]
            errors.setdefault(f"{kind}, {first.world_size} ranks", []).append(
                [
                    100 * abs(b / a - 1) if a > 0 else 0.0
                    for a, b in zip(_slowest_ms(first), _slowest_ms(second), strict=True)
                ]
            )
    return {
        name: {
            "num": len(rows),
            **dict(
                zip((*TIMES, CRITICAL_PATH), np.mean(rows, axis=0).round(2).tolist(), strict=True)
            ),
        }
        for name, rows in sorted(errors.items())
    }


def _slowest_ms(sample: Sample) -> list[float]:
    """Return each of `TIMES` on its slowest rank, and the critical path."""
    cost = sample.cost
    stages = (cost.stage_max_ms(stage) for stage in STAGES)
    return [cost.input_dist_max_ms or 0.0, *stages, cost.critical_path_ms]


def workload_of_sample(sample: Sample) -> Workload:
    """Return the shards of a measured plan in the form that cost models predict."""
    rows = [
        (
            shard.rank,
            shard.group_size(sample.world_size),
            shard.num_rows,
            shard.num_cols,
            sample.batch_size * shard.pooling_factor,
        )
        for shard in sample.shards
    ]
    histograms = [shard.reuse_histogram for shard in sample.shards]
    return workload_of_rows(
        sample.world_size, sample.ranks_per_host, sample.batch_size, rows, histograms
    )
