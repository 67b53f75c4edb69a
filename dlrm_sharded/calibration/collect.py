"""Collects costs: TorchRec shards random plans, which are measured as the plan of a run is.

`measure` times both in the same way, so a model of these samples needs no correction for the
overhead around FBGEMM's lookup or the collective.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dlrm_sharded.calibration.costs_file import write_costs
from dlrm_sharded.calibration.disturbance import is_disturbed
from dlrm_sharded.calibration.drawn_plans import plan_of_drawn
from dlrm_sharded.calibration.journal import Journal
from dlrm_sharded.calibration.plan_sizes import PlanSizes, plan_sizes
from dlrm_sharded.calibration.random_plans import draw_communication, draw_computation
from dlrm_sharded.calibration.samples import Sample
from dlrm_sharded.calibration.schedule import Slot, group_sizes, schedule
from dlrm_sharded.calibration.undisturbed import least_disturbed
from dlrm_sharded.files.errors import ConfigError, check_count, check_number
from dlrm_sharded.files.progress_bar import ProgressBar
from dlrm_sharded.files.provenance import commit, versions
from dlrm_sharded.hardware.detect import detect_hardware
from dlrm_sharded.hardware.hardware import Hardware
from dlrm_sharded.measuring.bench import Bench
from dlrm_sharded.measuring.drawn_table import DrawnTable
from dlrm_sharded.measuring.measure import MeasureConfig, MeasuredCost
from dlrm_sharded.measuring.random_ids import draw_batch
from dlrm_sharded.model.fused_optimizers import EMBEDDING_OPTIMIZERS
from dlrm_sharded.model.torchrec_adapter import to_torchrec
from dlrm_sharded.plans.task import Topology
from dlrm_sharded.ranks.agreement import all_or_none, on_rank_zero
from dlrm_sharded.ranks.distributed import Rank, leave_group, new_group_of
from dlrm_sharded.ranks.process import num_cores

log = logging.getLogger(__name__)

BAR_FORMAT = "{percentage:3.0f}%|{bar}| {elapsed}{postfix}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectConfig:
    """Settings of a collection.

    Args:
        num_samples: number of random plans, unless the time budget ends before.
        time_budget_s: time for this start; samples of earlier starts are kept.
        batch_sizes: global batch sizes; every plan is measured with one of them.
        table_gib: memory for tables per rank, with the state of their optimizer.
        ids_per_step: largest number of ids that one rank looks up, so that no plan takes long.
            None for the `default_sizes` of the device, as of the two before.
        optimizer: one of `EMBEDDING_OPTIMIZERS`, fused into the backward pass.
        repeat_every, num_repeats: every n-th plan is measured this many more times, which shows how
            well measurements repeat; n = 19 gives 5 % of the plans.
        measure: length of the measurement of a plan.
    """

    num_samples: int = 2000
    time_budget_s: float = 540.0
    seed: int = 0
    batch_sizes: Sequence[int] | None = None
    table_gib: float | None = None
    ids_per_step: int | None = None
    optimizer: str = "rowwise_adagrad"
    repeat_every: int = 19
    num_repeats: int = 1
    measure: MeasureConfig = field(
        default_factory=lambda: MeasureConfig(
            iterations=20, warmup=2, num_batches=3, time_budget_s=0.3
        )
    )

    def __post_init__(self) -> None:
        check_count("num_samples", self.num_samples, least=1)
        check_number("time_budget_s", self.time_budget_s, above=True)
        check_count("seed", self.seed, least=0)
        if self.table_gib is not None:
            check_number("table_gib", self.table_gib, above=True)
        if self.ids_per_step is not None:
            check_count("ids_per_step", self.ids_per_step, least=1)
        check_count("repeat_every", self.repeat_every, least=1)
        check_count("num_repeats", self.num_repeats, least=0)
        if self.batch_sizes is not None and not self.batch_sizes:
            raise ConfigError("batch_sizes is empty; give at least one global batch size")
        for batch_size in self.batch_sizes or ():
            check_count("a size in batch_sizes", batch_size, least=1)
        if self.optimizer not in EMBEDDING_OPTIMIZERS:
            raise ConfigError(
                f"optimizer is {self.optimizer!r}; known: {', '.join(EMBEDDING_OPTIMIZERS)}"
            )


def collect(config: CollectConfig, out: Path, rank: Rank) -> None:
    """Measure random plans and write them to `out`; all ranks of the job call it together.

    An unfinished collection of an earlier call is in `<out>.partial`, and continues there.

    Raises:
        ConfigError: `out` exists already, a batch size does not divide by the ranks, or
            `table_gib` does not fit a GPU.
        DataError: the unfinished collection has other hardware or other settings.
    """
    sizes = plan_sizes(
        rank,
        batch_sizes=config.batch_sizes,
        table_gib=config.table_gib,
        ids_per_step=config.ids_per_step,
    )
    hardware = detect_hardware(rank)
    conditions = _conditions(config, sizes, rank, hardware)
    journal = None
    with all_or_none():
        if rank.is_zero:
            journal = Journal(out, conditions)
    earlier = on_rank_zero(lambda: journal.samples() if journal else [])
    done = {(sample.number, sample.attempt) for sample in earlier}
    slots = list(
        schedule(
            config.num_samples,
            *group_sizes(rank),
            repeat_every=config.repeat_every,
            num_repeats=config.num_repeats,
        )
    )
    missing = [slot for slot in slots if (slot.number, slot.attempt) not in done]
    world_sizes = {slot.world_size for slot in slots}
    measurer = PlanMeasurer(config, sizes, rank, world_sizes)
    started, load_before = time.perf_counter(), os.getloadavg()
    budget_s = config.time_budget_s
    bar = ProgressBar(total=1.0, bar_format=BAR_FORMAT, disable=not journal)
    with bar:
        for number, slot in enumerate(missing, 1):
            if on_rank_zero(lambda: time.perf_counter() - started > budget_s):
                break
            sample = measurer.measure(slot)
            if journal and sample:
                journal.append(sample)
            spent_s = time.perf_counter() - started
            bar.set_postfix_str(f"{spent_s:.0f} of {budget_s:.0f} s, {number} plans", refresh=False)
            # either limit may end the collection
            bar.update(min(max(spent_s / budget_s, number / len(missing)), 1.0) - bar.n)
    if journal:
        samples = journal.samples()
        write_costs(
            out,
            samples,
            {
                **conditions,
                **hardware.to_meta(),
                **_cpu(),
                "commit": commit(),
                "collect_s": round(time.perf_counter() - started, 1),
                "load_average": {"before": load_before, "after": os.getloadavg()},
            },
        )
        journal.remove()
        log.info("%d of %d measurements in %s", len(samples), len(slots), out)
        if num_disturbed := sum(is_disturbed(sample.noise) for sample in samples):
            log.warning(
                "%d of %d measurements were taken while other processes had the core of a rank; "
                "they count less, and the prices say so: calibrate again when the machine is idle",
                num_disturbed,
                len(samples),
            )
        if measurer.num_exposed:
            log.warning(
                "%d measurements contain host time: the host is slow, or waits within a stage",
                measurer.num_exposed,
            )


def _cpu() -> dict[str, int]:
    """Return what this process has of the CPU."""
    return {"cores": num_cores(), "threads": torch.get_num_threads()}


def _conditions(
    config: CollectConfig, sizes: PlanSizes, rank: Rank, hardware: Hardware
) -> dict[str, Any]:
    """Return hardware, versions and settings, which are the same for all samples of a file.

    The probe is left out, as it differs a little when it is measured again.
    """
    assert hardware.fingerprint is not None
    settings = dataclasses.asdict(config)
    del settings["time_budget_s"], settings["num_samples"]
    computing, communicating = group_sizes(rank)
    return {
        "hardware": hardware.name,
        "hardware_id": hardware.fingerprint.id,
        "device": rank.device.type,
        "versions": versions(),
        "computation_ranks": computing,
        "communication_ranks": communicating,
        **settings,
        **dataclasses.asdict(sizes),
        # lookups on a GPU are as fast with other cores
        **(_cpu() if rank.device.type == "cpu" else {}),
    }


class PlanMeasurer:
    """Draws and measures the plans of slots on the ranks of this job.

    Args:
        world_sizes: numbers of ranks of the slots.
    """

    def __init__(
        self, config: CollectConfig, sizes: PlanSizes, rank: Rank, world_sizes: set[int]
    ) -> None:
        self.num_exposed = 0
        """Number of measurements with host time in a stage on a GPU."""
        self._config = config
        self._sizes = sizes
        self._limits = sizes.rank_limits(config.optimizer)
        self._rank = rank
        self._world_sizes = world_sizes
        groups = {size: new_group_of(range(size)) for size in sorted(world_sizes)}
        self._groups = {size: group for size, group in groups.items() if group is not None}
        self._computing, _ = group_sizes(rank)
        self._bench = Bench(
            config.measure,
            rank.device,
            optimizer=config.optimizer,
            table_bytes=self._limits.table_bytes if rank.rank < self._computing else 0,
        )

    def leave(self) -> None:
        """Leave the groups of ranks, in which nothing is measured any more."""
        for group in self._groups.values():
            leave_group(group)

    def measure(self, slot: Slot) -> Sample | None:
        """Measure the plan of a slot; return None on ranks that take no part."""
        if self._rank.rank >= slot.world_size:
            return None
        rng = np.random.default_rng([self._config.seed, slot.number])
        batch_size = int(rng.choice(np.asarray(self._sizes.batch_sizes)))
        batch_size -= batch_size % slot.world_size  # there may be 3 cores for 4 ranks
        draw = draw_computation if slot.kind == "computation" else draw_communication
        drawn = draw(rng, world_size=slot.world_size, batch_size=batch_size, limits=self._limits)
        return self.measure_drawn(slot, drawn, batch_size, rng)

    def measure_drawn(
        self, slot: Slot, drawn: Sequence[DrawnTable], batch_size: int, rng: np.random.Generator
    ) -> Sample | None:
        """Measure the plan of drawn tables; return None on ranks that take no part.

        Args:
            batch_size: global batch, which the ranks of the slot share equally.
            rng: draws the ids, and has the same state on all ranks.
        """
        if self._rank.rank >= slot.world_size:
            return None
        batches = [
            draw_batch(drawn, batch_size // slot.world_size, batch_rng, batch_size=batch_size)
            for batch_rng in rng.spawn(slot.world_size)[self._rank.rank].spawn(
                self._config.measure.num_batches
            )
        ]
        plan, task = plan_of_drawn(
            drawn,
            batch_size,
            Topology(
                slot.world_size,
                memory_bytes=1,
                local_world_size=min(self._rank.local_world_size, slot.world_size),
                compute_device=self._rank.device.type,
            ),
        )
        group = self._groups[slot.world_size]

        def measure() -> MeasuredCost:  # TorchRec changes the plan that it gets
            torchrec_plan = to_torchrec(plan, task.tables, task.topology)
            return self._bench.measure(task.tables, torchrec_plan, batches, group=group)

        measured, beside = least_disturbed(
            measure,
            self._rank.device,
            group,
            has_cores=slot.world_size <= self._computing,
        )
        self.num_exposed += bool(measured.exposed)
        patterns = {
            table.name: of.accesses.name for table, of in zip(task.tables, drawn, strict=True)
        }
        sample = Sample.of_plan(
            plan,
            task,
            measured.cost,
            kind=slot.kind,
            number=slot.number,
            attempt=slot.attempt,
            accesses=patterns,
        )
        return dataclasses.replace(sample, noise=beside.noise)
