"""The store of samples of some hardware: plans that were measured on it, and their times.

A run appends the plan that it trains, which it measures anyway; a first run and `dlrm-calibrate`
append what they collect. The file is in the user's cache folder, one for each hardware, and has a
line for each sample. Later predictions on this hardware come from all of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlrm_sharded.accesses.profiles import with_profiles
from dlrm_sharded.calibration.disturbance import Disturbance
from dlrm_sharded.calibration.samples import RUN, Sample, problem_of, sound_sample
from dlrm_sharded.cost.workload import workload_of_plan
from dlrm_sharded.files.errors import ConfigError, check_path
from dlrm_sharded.files.json_forms import read_form
from dlrm_sharded.files.line_file import LineFile
from dlrm_sharded.files.user_cache import journal_folder
from dlrm_sharded.hardware.context import RunContext
from dlrm_sharded.plans.plan import ShardingPlan
from dlrm_sharded.plans.plan_cost import PlanCost
from dlrm_sharded.plans.task import ShardingTask

JOURNAL_FORMAT = 1
MAX_SAMPLES, MAX_RUNS = 1000, 50
"""Number of the latest samples that are read, and of runs among them: plans of runs are alike."""


@dataclass(frozen=True, slots=True)
class Conditions:
    """Conditions that samples must share with a run to apply to it.

    Args:
        optimizer: fused optimizer of the tables.
        ranks_per_host: ranks of a host, which may share its cores and links; None for samples that
            count for any number of them.
        fbgemm: version of FBGEMM; None if it is not known, and such samples count.
        threads: threads with which a rank computes; None as for `fbgemm`.
    """

    optimizer: str
    ranks_per_host: int | None
    fbgemm: str | None = None
    threads: int | None = None

    def allow(self, other: Conditions) -> bool:
        """Return whether samples under other conditions apply to runs under these."""
        pairs = (
            (self.ranks_per_host, other.ranks_per_host),
            (self.fbgemm, other.fbgemm),
            (self.threads, other.threads),
        )
        return self.optimizer == other.optimizer and all(
            None in pair or pair[0] == pair[1] for pair in pairs
        )


@dataclass(frozen=True, slots=True)
class SampleStore:
    """The file of samples of one kind of hardware; it need not exist.

    Args:
        staged: see `LineFile`.
    """

    path: Path
    staged: Path | None = None

    def append(
        self, conditions: Conditions, sample: Sample, disturbance: Disturbance | None = None
    ) -> bool:
        """Write a sample at the end and return True; if that is impossible, warn and return False.

        Args:
            disturbance: signs of other work during the measurement; None if nobody looked.
        """
        problem = problem_of(sample)
        if problem is not None:
            self._file.refuse(f"it cannot have been measured ({problem})")
            return False
        return self._file.note(
            {
                **dataclasses.asdict(conditions),
                "beside": None if disturbance is None else dataclasses.asdict(disturbance),
                "run": sample.to_row(),
            }
        )

    def read(self, conditions: Conditions | None) -> dict[int, Sample]:
        """Return the latest samples under these conditions by line number, the last one last.

        There are at most `MAX_RUNS` runs among them, and `MAX_SAMPLES` in all.

        With None, samples under any conditions count.

        Their `noise` follows from the signs of other work in their lines. Samples of tables without
        a profile, which earlier versions wrote, are left out, because their lookups are not known.
        Lines that are not samples are passed over with one warning; the file is not changed.
        """

        num_runs = 0

        def sample_of(fields: Mapping[str, Any]) -> Sample | None:
            nonlocal num_runs
            found, sample = _read(fields)
            if not (conditions is None or conditions.allow(found)) or not _has_profiles(sample):
                return None
            num_runs += sample.kind == RUN
            return sample if sample.kind != RUN or num_runs <= MAX_RUNS else None

        return self._file.latest(sample_of, most=MAX_SAMPLES)  # which reads the last line first

    @property
    def _file(self) -> LineFile:
        return LineFile(self.path, "sample", JOURNAL_FORMAT, self.staged)


def sample_store(
    context: RunContext, journal: str | None, *, staged: Path | None = None
) -> SampleStore | None:
    """Return the store of a run's hardware; None if it has none, or the hardware is not known.

    Args:
        journal: folder of stores; "auto" for the one in the user's cache, None or "none" for none.
        staged: see `LineFile`.

    Raises:
        ConfigError: `journal` is not the path of a folder.
    """
    if journal in (None, "none"):
        return None
    if not isinstance(journal, str):
        raise ConfigError(f"journal is {journal!r}; it must be auto, null or the path of a folder")
    if journal != "auto":
        check_path("journal", journal)
    return store_in(journal_folder(journal), context, staged=staged)


def store_in(
    folder: Path, context: RunContext, *, staged: Path | None = None
) -> SampleStore | None:
    """Return the store of a run's hardware in a folder; None if the hardware is not known."""
    if context.hardware is None or context.hardware.fingerprint is None:
        return None
    return SampleStore(folder / f"{context.hardware.fingerprint.id}.jsonl", staged)


def conditions_of(context: RunContext) -> Conditions | None:
    """Return the conditions of a run; None if its optimizer or its ranks per host are not known."""
    if context.optimizer is None or context.ranks_per_host is None:
        return None
    fingerprint = None if context.hardware is None else context.hardware.fingerprint
    threads = None if fingerprint is None else fingerprint.cpu.threads
    return Conditions(context.optimizer, context.ranks_per_host, context.fbgemm, threads)


def drawn_conditions(context: RunContext) -> Conditions:
    """Return the conditions of samples of drawn plans, which have their own number of ranks."""
    conditions = conditions_of(context)
    assert conditions is not None, "what is measured here has an optimizer and ranks"
    return dataclasses.replace(conditions, ranks_per_host=None)


def next_number(samples: Iterable[Sample]) -> int:
    """Return the number of the next plan to draw after the plans of some samples."""
    return max((sample.number + 1 for sample in samples if sample.kind != RUN), default=0)


def sample_of_run(plan: ShardingPlan, task: ShardingTask, cost: PlanCost) -> Sample | None:
    """Return a plan that a run measured, with the profiles of its task, or expected ones.

    It is None for plans that samples cannot express, with row blocks on the ranks of one host, and
    for those in another precision than fp32.
    """
    sizes = workload_of_plan(plan, task).group_size
    if ((sizes > 1) & (sizes < task.topology.world_size)).any():
        return None
    if plan.half_tables() or not plan.exchange_precision.is_exact:
        return None
    return Sample.of_plan(plan, with_profiles(task), cost, kind=RUN)


def _has_profiles(sample: Sample) -> bool:
    return all(any(shard.reuse_histogram) for shard in sample.shards if shard.pooling_factor > 0)


def _read(fields: Mapping[str, Any]) -> tuple[Conditions, Sample]:
    sample = sound_sample(fields["run"])
    # 0.2 wrote neither the version of FBGEMM nor threads, nor signs of other work
    keys = ("optimizer", "ranks_per_host", "fbgemm", "threads")
    own = {key: fields[key] for key in keys if key in fields}
    if fields.get("beside") is not None:
        disturbance = read_form(fields["beside"], Disturbance, name="other work")
        sample = dataclasses.replace(sample, noise=disturbance.noise)
    return read_form(own, Conditions, name="the conditions"), sample
