"""The collector: draws plans and measures one after another, until its time is over.

A first run has 20 s for it, and `dlrm-calibrate` has minutes. `measure` times these plans in the
same way as the plan of a run, so a model of these samples needs no correction for the overhead
around FBGEMM's lookup or the collective.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
import torch.distributed as dist

from dlrm_sharded.calibration.disturbance import Disturbance, core_wait_text
from dlrm_sharded.calibration.drawn_plans import DrawnPlan, draw_plan
from dlrm_sharded.calibration.plan_limits import BATCH_SIZES, PlanSizes, plan_limits
from dlrm_sharded.calibration.samples import Sample
from dlrm_sharded.files.progress_bar import ProgressBar
from dlrm_sharded.hardware.detect import MAX_LOAD_PER_CORE, release_memory
from dlrm_sharded.hardware.torch_defaults import torch_defaults
from dlrm_sharded.measuring.bench import Bench
from dlrm_sharded.measuring.measure import MeasureConfig
from dlrm_sharded.measuring.random_ids import draw_batch
from dlrm_sharded.measuring.stage_clock import max_over_ranks
from dlrm_sharded.model.torchrec_adapter import to_torchrec
from dlrm_sharded.plans.tables import Table
from dlrm_sharded.ranks.agreement import all_or_none, on_rank_zero
from dlrm_sharded.ranks.distributed import Rank, has_core_for_each, leave_group, new_group_of
from dlrm_sharded.ranks.machine_load import LoadWatch, MachineLoad, core_wait_s
from dlrm_sharded.ranks.process import num_cores

log = logging.getLogger(__name__)

MEASURE = MeasureConfig(iterations=8, warmup=1, num_batches=2, time_budget_s=0.25)
"""Length of one measurement."""

MEASURING_SHARE = 0.9
"""Share of the time after which no plan starts; the rest is for the last one and the fit."""

REPORTED_WAIT = 0.1
"""Share of the time in which other processes have a rank's core, above which it is reported."""

BAR_FORMAT = "{percentage:3.0f}%|{bar}| {elapsed}{postfix}"

Note = Callable[[Sample, Disturbance], None]
"""Takes a sample, and the signs of other work during its measurement."""


@torch_defaults()
def collect(
    rank: Rank,
    note: Note,
    *,
    optimizer: str,
    sizes: PlanSizes,
    budget_s: float,
    tables: Sequence[Table] = (),
    batch_sizes: Sequence[int] | None = None,
    first: int = 0,
    seed: int = 0,
) -> str | None:
    """Measure drawn plans on the ranks of a job, which all call it together.

    Args:
        note: takes each sample when it is measured; called on rank 0.
        optimizer: fused optimizer of the tables.
        budget_s: time for the measurements and the fit; at least one plan is measured.
        tables: tables of a run, from which plans are drawn; none for random ones.
        batch_sizes: global batch sizes; None for the defaults of the device type.
        first: number of the first plan. What is drawn depends on the seed and on this number.

    Returns:
        The load that was seen during the measurements; None if there was little.
    """
    started_s, watch = time.perf_counter(), LoadWatch(rank.device)
    limits = plan_limits(rank, optimizer, sizes)
    computing, exchanging = group_sizes(rank)
    measurer = _Measurer(rank, optimizer, computing, limits.table_bytes)
    with (
        _groups(rank, {computing, *exchanging}) as groups,
        ProgressBar(total=1.0, bar_format=BAR_FORMAT, disable=not rank.is_zero) as bar,
    ):
        for number in itertools.count(first):
            rng = np.random.default_rng([seed, number])
            plan = draw_plan(
                number,
                rng,
                limits,
                batch_sizes=batch_sizes or BATCH_SIZES[rank.device.type],
                computing=computing,
                exchanging=exchanging,
                tables=tables,
            )
            measured = None
            if rank.rank < plan.world_size:
                measured = measurer.measure(plan, number, rng, groups[plan.world_size])
            with all_or_none():
                if measured is not None and rank.is_zero:
                    note(*measured)
            spent = on_rank_zero(lambda: min(1.0, (time.perf_counter() - started_s) / budget_s))
            text = f"{spent * budget_s:.0f} of {budget_s:.0f} s, {number - first + 1} plans"
            bar.set_postfix_str(text, refresh=False)
            bar.update(spent - bar.n)
            if spent > MEASURING_SHARE:
                break
    found = watch.conclude()
    measurer.close()
    return _other_work(rank, found)


class _Measurer:
    """Measures drawn plans on a rank.

    Args:
        computing: ranks that compute at once.
        table_bytes: memory for the tables of a rank.
    """

    def __init__(self, rank: Rank, optimizer: str, computing: int, table_bytes: int) -> None:
        self.num_exposed = 0
        """Number of measurements with host time in a stage on a GPU."""
        self._rank = rank
        self._computing = computing
        self._bench = Bench(
            MEASURE,
            rank.device,
            optimizer=optimizer,
            table_bytes=table_bytes if rank.rank < computing else 0,
        )

    def measure(
        self, drawn: DrawnPlan, number: int, rng: np.random.Generator, group: dist.ProcessGroup
    ) -> tuple[Sample, Disturbance]:
        """Measure a plan on the first ranks of the job, which call it together.

        Signs of other work are known only on CPUs, if the ranks have cores of their own: ranks that
        share cores wait for each other, and a GPU does not wait for other work on the host.

        Args:
            rng: draws the ids, and has the same state on all ranks.
        """
        rank, world_size = self._rank, drawn.world_size
        batches = [
            draw_batch(
                drawn.tables, drawn.batch_size // world_size, batch_rng, batch_size=drawn.batch_size
            )
            for batch_rng in rng.spawn(world_size)[rank.rank].spawn(MEASURE.num_batches)
        ]
        plan, task = drawn.as_plan(rank.device.type, rank.local_world_size)
        torchrec_plan = to_torchrec(plan, task.tables, task.topology)
        started_s, waited_s = time.perf_counter(), core_wait_s()
        measured = self._bench.measure(task.tables, torchrec_plan, batches, group=group)
        self.num_exposed += bool(measured.exposed)
        disturbance = Disturbance()
        if rank.device.type == "cpu" and world_size <= self._computing:
            share = (core_wait_s() - waited_s) / (time.perf_counter() - started_s)
            disturbance = Disturbance(core_wait=max_over_ranks(share, rank.device, group))
        sample = Sample.of_plan(plan, task, measured.cost, kind=drawn.kind, number=number)
        return sample, disturbance

    def close(self) -> None:
        """Free the memory of tables, and warn of measurements that contain time of the host."""
        del self._bench
        gc.collect()  # sharded modules are in reference cycles
        release_memory(self._rank.device)
        if self.num_exposed:
            log.warning(
                "%d measurements contain host time, because the host is slow or waits within "
                "a stage",
                self.num_exposed,
            )


def group_sizes(rank: Rank) -> tuple[int, list[int]]:
    """Return how many ranks of a host compute at once, and sizes of exchange groups, largest first.

    Of the ranks on CPUs, only as many compute at once as have cores for their threads. Groups of
    exchanges are parts of a host or whole hosts.
    """
    computing = per_host = rank.local_world_size
    if rank.device.type == "cpu":
        computing = min(per_host, max(num_cores() // torch.get_num_threads(), 1))
    powers = {2**i for i in range(1, rank.world_size.bit_length())}
    whole_hosts = {size for size in powers if size <= per_host or size % per_host == 0}
    return computing, sorted({*whole_hosts, rank.world_size} - {1}, reverse=True)


@contextlib.contextmanager
def _groups(rank: Rank, sizes: set[int]) -> Iterator[dict[int, dist.ProcessGroup]]:
    """Make groups of the first ranks by their sizes, and leave them at the end of the block."""
    made = {size: new_group_of(range(size)) for size in sorted(sizes)}
    groups = {size: group for size, group in made.items() if group is not None}
    yield groups
    for group in groups.values():
        leave_group(group)


def _other_work(rank: Rank, found: MachineLoad) -> str | None:
    """Say under which load the measurements were made; None if there was little."""
    load, cores = max(found.hosts.values()), os.cpu_count() or 1
    if load > (MAX_LOAD_PER_CORE if torch.get_num_threads() == 1 else 1) * cores:
        return f"the load average was {load:.1f} on {cores} cores"
    if has_core_for_each(rank) and found.core_wait > REPORTED_WAIT:
        return core_wait_text(found.core_wait)
    return found.slowed_gpu
