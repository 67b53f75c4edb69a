"""The journal of runs: plans that runs measured on some hardware, and their stages on each rank.

A run measures its plan anyway. Rank 0 appends what was measured to a file of the hardware, which is
in the user's cache folder, and the next prediction there is corrected by it.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from dlrm_sharded.calibration.samples import MeasuredShard, Sample, check_sample
from dlrm_sharded.cost.features import workload_of_plan
from dlrm_sharded.errors import DataError
from dlrm_sharded.json_files import replace_file
from dlrm_sharded.plan import ShardingPlan
from dlrm_sharded.plan_cost import PlanCost
from dlrm_sharded.task import ShardingTask

log = logging.getLogger(__name__)

JOURNAL_FORMAT = 1
MAX_RUNS = 50
"""Number of the latest runs that are read."""

MAX_JOURNAL_BYTES = 32 * 2**20
"""Size beyond which a journal loses the earlier half of its runs."""

LOCK_S = 10.0
"""Time to wait for another run that writes."""


@dataclass(frozen=True, slots=True)
class Conditions:
    """Conditions that two runs must share for one to tell of the other.

    Args:
        optimizer: fused optimizer of the tables.
        ranks_per_host: ranks of a host, which may share its cores and links.
    """

    optimizer: str
    ranks_per_host: int


@dataclass(frozen=True, slots=True)
class RunJournal:
    """The file of one hardware; it need not exist."""

    path: Path

    def append(self, conditions: Conditions, run: Sample) -> None:
        """Write a run at the end; a file or folder that cannot be written costs a warning."""
        line = json.dumps({"format": JOURNAL_FORMAT, **_fields(conditions), "run": run.to_row()})
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(self.path.with_suffix(".lock"), timeout=LOCK_S):
                if self.path.exists() and self.path.stat().st_size > MAX_JOURNAL_BYTES:
                    lines = self.path.read_bytes().splitlines(keepends=True)
                    replace_file(self.path, b"".join(lines[len(lines) // 2 :]))
                with self.path.open("ab") as file:
                    file.write(_after_whole_line(self.path) + line.encode() + b"\n")
        except (OSError, Timeout) as error:
            log.warning("the run is not noted in the journal %s: %s", self.path, error)

    def read(self, conditions: Conditions) -> list[Sample]:
        """Return the latest runs under these conditions, the last one last.

        Lines that are no runs are passed over with one warning; the file stays as it is.
        """
        try:
            lines = self.path.read_bytes().splitlines()
        except FileNotFoundError:
            return []
        except OSError as error:
            log.warning("the journal of runs %s cannot be read: %s", self.path, error)
            return []
        runs: list[Sample] = []
        damaged: list[int] = []
        for number in range(len(lines), 0, -1):
            try:
                fields = json.loads(lines[number - 1])
                found, run = _read(fields, self.path)
            except (AttributeError, LookupError, TypeError, ValueError, RecursionError, DataError):
                damaged.append(number)
                continue
            if found == conditions:
                runs.append(run)
            if len(runs) == MAX_RUNS:
                break
        if damaged:
            log.warning(
                "%d of %d lines of the journal of runs %s are damaged and passed over, the last "
                "one is line %d",
                len(damaged),
                len(lines),
                self.path,
                damaged[0],
            )
        return runs[::-1]


def measured_run(plan: ShardingPlan, task: ShardingTask, cost: PlanCost) -> Sample | None:
    """Return a plan that a run measured, with the profiles of its task.

    It is None for plans with row blocks on the ranks of one host, which samples cannot express.
    """
    workload = workload_of_plan(plan, task)
    sizes = workload.group_size
    if ((sizes > 1) & (sizes < task.topology.world_size)).any():
        return None
    shards = [
        MeasuredShard(
            rank=shard.rank,
            num_rows=shard.num_rows,
            num_cols=shard.num_cols,
            pooling_factor=float(num_ids) / task.batch_size,
            reuse_histogram=tuple(round(share, 6) for share in histogram.tolist()),
            row_wise=bool(size > 1),
            replicated=shard.replicated,
        )
        for shard, num_ids, histogram, size in zip(
            plan.shards, workload.num_ids, workload.reuse_histogram, sizes, strict=True
        )
    ]
    return Sample(
        kind="run",
        number=0,
        attempt=0,
        world_size=plan.world_size,
        ranks_per_host=task.topology.ranks_per_host,
        batch_size=task.batch_size,
        shards=tuple(shards),
        cost=cost,
    )


def _fields(conditions: Conditions) -> dict[str, Any]:
    return {"optimizer": conditions.optimizer, "ranks_per_host": conditions.ranks_per_host}


def _read(fields: Mapping[str, Any], path: Path) -> tuple[Conditions, Sample]:
    if fields["format"] != JOURNAL_FORMAT:
        raise ValueError(f"format {fields['format']!r}")
    run = Sample.from_row(fields["run"])
    check_sample(run, path)
    return Conditions(fields["optimizer"], fields["ranks_per_host"]), run


def _after_whole_line(path: Path) -> bytes:
    """Return the end of a line that a kill has cut off, which would damage the next one too."""
    if not path.exists() or path.stat().st_size == 0:
        return b""
    with path.open("rb") as file:
        file.seek(-1, 2)
        return b"" if file.read() == b"\n" else b"\n"
