"""The journal of runs: plans that runs measured on some hardware, and their stages on each rank.

A run measures its plan anyway. Rank 0 appends what was measured to a file of the hardware, which is
in the user's cache folder, and the next prediction there is corrected by it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlrm_sharded.accesses.profiles import with_profiles
from dlrm_sharded.calibration.confidence import Disturbance
from dlrm_sharded.calibration.samples import Sample, problem_of, sound_sample
from dlrm_sharded.cost.kernel_changes import changes_between
from dlrm_sharded.cost.workload import workload_of_plan
from dlrm_sharded.files.errors import DataError
from dlrm_sharded.files.json_forms import read_form
from dlrm_sharded.files.line_file import LineFile
from dlrm_sharded.plans.plan import ShardingPlan
from dlrm_sharded.plans.plan_cost import PlanCost
from dlrm_sharded.plans.task import ShardingTask

JOURNAL_FORMAT = 1
MAX_RUNS = 50
"""Number of the latest runs that are read."""


@dataclass(frozen=True, slots=True)
class Conditions:
    """Conditions that two runs must share for one to tell of the other.

    Args:
        optimizer: fused optimizer of the tables.
        ranks_per_host: ranks of a host, which may share its cores and links.
        fbgemm: version of FBGEMM; None if it is not known. Others count, unless one of
            `KERNEL_CHANGES` is between them.
        device: "cpu" or "cuda"; a journal is of one.
        threads: threads that a rank computes with; None if they are not known, as in lines of
            earlier versions, which count.
    """

    optimizer: str
    ranks_per_host: int
    fbgemm: str | None = None
    device: str = "cpu"
    threads: int | None = None

    def allow(self, other: Conditions) -> bool:
        """Return whether runs under other conditions tell of runs under these."""
        return (
            (self.optimizer, self.ranks_per_host) == (other.optimizer, other.ranks_per_host)
            and (None in (self.threads, other.threads) or self.threads == other.threads)
        ) and not changes_between(
            other.fbgemm, self.fbgemm, device=self.device, optimizer=self.optimizer
        )


@dataclass(frozen=True, slots=True)
class SampleStore:
    """The file of one hardware; it need not exist.

    Args:
        outbox: see `LineFile`.
    """

    path: Path
    outbox: Path | None = None

    def append(
        self, conditions: Conditions, run: Sample, beside: Disturbance | None = None
    ) -> bool:
        """Write a run at the end and return True; if that is impossible, warn and return False.

        Args:
            beside: signs of other work while the run was measured; None if nobody looked.
        """
        problem = problem_of(run)
        if problem is not None:
            self._file.refuse(f"it cannot have been measured ({problem})")
            return False
        return self._file.note(
            {
                "optimizer": conditions.optimizer,
                "ranks_per_host": conditions.ranks_per_host,
                "fbgemm": conditions.fbgemm,
                "threads": conditions.threads,
                "beside": None if beside is None else dataclasses.asdict(beside),
                "run": run.to_row(),
            }
        )

    def read(self, conditions: Conditions) -> dict[int, Sample]:
        """Return the latest runs under these conditions by line number, the last one last.

        Their `noise` follows from the signs of other work in their lines. Runs of tables without a
        profile, as earlier versions wrote them, tell nothing, as their prices are not known.
        Lines that are no runs are passed over with one warning; the file stays as it is.
        """

        def run_of(fields: Mapping[str, Any]) -> Sample | None:
            found, run = _read(fields)
            return run if conditions.allow(found) and _has_profiles(run) else None

        return self._file.latest(run_of, most=MAX_RUNS)

    @property
    def _file(self) -> LineFile:
        return LineFile(self.path, "run", JOURNAL_FORMAT, self.outbox)


def measured_run(plan: ShardingPlan, task: ShardingTask, cost: PlanCost) -> Sample | None:
    """Return a plan that a run measured, with the profiles of its task, or expected ones.

    It is None for plans with row blocks on the ranks of one host, which samples cannot express.
    """
    sizes = workload_of_plan(plan, task).group_size
    if ((sizes > 1) & (sizes < task.topology.world_size)).any():
        return None
    run = Sample.of_plan(plan, with_profiles(task), cost, kind="run")
    rounded = [tuple(round(share, 6) for share in shard.reuse_histogram) for shard in run.shards]
    shards = (
        dataclasses.replace(shard, reuse_histogram=histogram)
        for shard, histogram in zip(run.shards, rounded, strict=True)
    )
    return dataclasses.replace(run, shards=tuple(shards))


def _has_profiles(run: Sample) -> bool:
    return all(any(shard.reuse_histogram) for shard in run.shards if shard.pooling_factor > 0)


def _read(fields: Mapping[str, Any]) -> tuple[Conditions, Sample]:
    run = sound_sample(fields["run"])
    # earlier versions wrote neither the version of FBGEMM nor threads, nor what ran beside
    keys = ("optimizer", "ranks_per_host", "fbgemm", "threads")
    own = {key: fields[key] for key in keys if key in fields}
    if fields.get("beside") is not None:
        beside = read_form(fields["beside"], Disturbance, name="other work")
        run = dataclasses.replace(run, noise=beside.noise)
    conditions = read_form(own, Conditions, name="the conditions")
    if conditions.ranks_per_host != run.ranks_per_host:
        raise DataError(
            f"ranks_per_host is {conditions.ranks_per_host}, and {run.ranks_per_host} in its run"
        )
    return conditions, run
