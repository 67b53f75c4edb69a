"""Prepares a run: finds its hardware, data, starting point and task."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dlrm_sharded.calibration.sample_store import SampleStore, sample_store
from dlrm_sharded.datasets.base import SPLITS, BatchStream, Split
from dlrm_sharded.files.line_file import STAGED
from dlrm_sharded.hardware.context import RunContext
from dlrm_sharded.hardware.detect import context_of_job
from dlrm_sharded.job.first_measurement import with_measured_costs
from dlrm_sharded.job.owned_folder import RunFolder
from dlrm_sharded.job.settings import JobSettings
from dlrm_sharded.job.start import Start, check_length, find_start
from dlrm_sharded.job.trained_config import must_match_in_data
from dlrm_sharded.plans.task import ShardingTask
from dlrm_sharded.ranks.agreement import (
    all_or_none,
    check_in_group,
    on_rank_zero,
    patiently_on_rank_zero,
)
from dlrm_sharded.ranks.device_memory import with_memory_of_all_ranks
from dlrm_sharded.ranks.distributed import Rank
from dlrm_sharded.sharders.planning import Planner


@dataclass(frozen=True)
class Prepared:
    """Holds what is known about a run before it is planned.

    Args:
        context: the hardware of the ranks, and what depends on it.
        store: what was measured on this hardware; None if the run neither reads nor extends it.
        planner: the planner on rank 0; None on the others.
        streams: batches of this rank, by split.
    """

    settings: JobSettings
    rank: Rank
    folder: RunFolder
    context: RunContext
    store: SampleStore | None
    planner: Planner | None
    streams: Mapping[Split, BatchStream]
    start: Start
    task: ShardingTask


def prepare(settings: JobSettings, rank: Rank, folder: RunFolder) -> Prepared:
    """Read the data, the checkpoints and the hardware; a collective of all ranks.

    Raises:
        CheckpointError: a checkpoint cannot be used; see `find_start`.
        ConfigError: a setting cannot be used.
        UnlikeRanksError: the ranks do not read the same data.
    """
    context = context_of_job(rank, settings.optimizer.embedding)
    with all_or_none():
        staged = folder.path / STAGED if settings.cost_model_snapshot else None
        store = sample_store(context, settings.journal, staged=staged)
        planner = settings.planner.planner(context) if rank.is_zero else None
    start = find_start(settings, rank, folder)
    # At its first use, a dataset may convert its files, which can take hours on rank 0.
    patiently_on_rank_zero(lambda: settings.dataset.num_batches("train"))
    with all_or_none():
        streams = {of: settings.stream(of, rank, shuffled=of == "train") for of in SPLITS}
        data = must_match_in_data(settings.dataset)
    check_in_group(data)
    with all_or_none():
        check_length(start, settings.trainer, len(streams["train"]))
        settings.trainer.check_validation(len(streams["val"]))
    topology = with_memory_of_all_ranks(settings.topology)
    task = on_rank_zero(lambda: settings.task(topology))
    if start.plan_to_keep(settings.config, task.topology.world_size) is None:
        planner = with_measured_costs(
            planner,
            rank,
            context,
            task,
            budget_s=settings.start_budget_s,
            journal=settings.journal,
            new_planner=settings.planner.planner,
            snapshot=settings.cost_model_snapshot,
        )
    return Prepared(settings, rank, folder, context, store, planner, streams, start, task)
