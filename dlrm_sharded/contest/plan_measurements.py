"""Measures the plans of a task: the computation of their ranks, on this machine, in rounds.

Each round builds and measures every rank of every plan once, in a new random order, so that other
load on the machine affects all sharders alike. Exchanges have their predicted times.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dlrm_sharded.contest.cases import Entry, Measurement, digest
from dlrm_sharded.files.errors import ConfigError
from dlrm_sharded.files.json_forms import read_form
from dlrm_sharded.files.line_file import LineFile
from dlrm_sharded.files.provenance import device_name
from dlrm_sharded.measuring.measure import MeasureConfig
from dlrm_sharded.measuring.rank_bench import RankBench, TableIds, draw_ids, with_measured
from dlrm_sharded.plans.plan import ShardingPlan
from dlrm_sharded.plans.plan_cost import PlanCost
from dlrm_sharded.plans.task import ShardingTask
from dlrm_sharded.ranks.device_memory import free_bytes
from dlrm_sharded.ranks.devices import device_type
from dlrm_sharded.ranks.distributed import Rank, process_group

MEASUREMENTS = "measurements.jsonl"
WARMUP, NUM_BATCHES = 2, 3
"""Iterations of a rank in a round that are not timed, and batches that are used in turn."""

OPTIMIZER = "rowwise_adagrad"
"""Optimizer of measured tables whose task names none."""

MEMORY_SHARE = 0.5
"""Largest share of the device's free memory that the tables of a rank may take."""

log = logging.getLogger("dlrm_sharded.compare")


def measure_tasks(
    entries: Sequence[Entry], out: Path, *, rounds: int, iterations: int, seed: int
) -> dict[str, Measurement]:
    """Measure the plans of all tasks, one task after the other; the folder keeps what is done.

    Args:
        rounds: rounds of each task; 95 % confidence needs at least 6.
        iterations: timed iterations of a rank in one round, see `MeasureConfig`.
        seed: seed of the ids and the order.

    Raises:
        ConfigError: a rank is too large for this machine.
    """
    planned: dict[str, list[Entry]] = {}
    for entry in entries:
        if entry.outcome.cost is not None:
            planned.setdefault(entry.case.task_name, []).append(entry)
    file = LineFile(out / MEASUREMENTS, "measurement")
    config = MeasureConfig(iterations=iterations, warmup=WARMUP, num_batches=NUM_BATCHES)
    settings = [rounds, seed, dataclasses.asdict(config), device_name(torch.device(device_type()))]
    key_of = {
        name: digest([entry.case.key() for entry in cases], *settings)
        for name, cases in planned.items()
    }
    found = dict(file.latest(_kept).values())
    if missing := [name for name, key in key_of.items() if key not in found]:
        with process_group() as rank:
            for name in missing:
                measured = _measured(planned[name], config, rank, rounds=rounds, seed=seed)
                file.append({"key": key_of[name], "measurement": dataclasses.asdict(measured)})
                found[key_of[name]] = measured
                texts = (f"{who} {cost.cost_ms:.2f}" for who, cost in measured.costs.items())
                log.info("measured %s, ms: %s", name, ", ".join(texts))
    return {name: found[key] for name, key in key_of.items()}


def check_measurable(name: str, task: ShardingTask) -> None:
    """Raise ConfigError if this machine's device is not of the type of a task's ranks."""
    device = device_type()
    if task.topology.compute_device != device:
        raise ConfigError(
            f"measured=true measures on this machine ({device}), but {name} is for ranks on "
            f"{task.topology.compute_device}; leave measured out, or make tasks for this device"
        )


def _measured(
    planned: Sequence[Entry], config: MeasureConfig, rank: Rank, *, rounds: int, seed: int
) -> Measurement:
    """Measure the plans of a task in a job of a single rank, all on the same ids."""
    task = planned[0].case.task
    plans = {entry.case.sharder: entry.plan for entry in planned}
    predicted = {entry.case.sharder: entry.outcome.cost for entry in planned if entry.outcome.cost}
    ranks = [shards for plan in plans.values() for shards in plan.shards_by_rank()]
    fullest = max(sum(shard.weight_bytes for shard in shards) for shards in ranks)
    free = free_bytes(rank.device, rank.local_world_size)
    if fullest > MEMORY_SHARE * free:
        raise ConfigError(
            f"a rank has {fullest:,} B of tables, more than half of the {free:,} B that are free "
            f"on this {rank.device.type}; measure smaller tasks, such as those of task_set=measured"
        )
    torch.set_num_threads(1)
    optimizer = task.known_optimizer or OPTIMIZER
    bench = RankBench(config, rank.device, table_bytes=fullest, optimizer=optimizer)
    ids = draw_ids(
        task.tables,
        batch_size=task.batch_size,
        num_batches=config.num_batches,
        seed=seed,
        num_ranks=task.topology.world_size,
    )
    rng = np.random.default_rng(seed)
    return measure_plans(plans, predicted, bench, ids, rounds=rounds, rng=rng)


def measure_plans(
    plans: Mapping[str, ShardingPlan],
    predicted: Mapping[str, PlanCost],
    bench: RankBench,
    ids: TableIds,
    *,
    rounds: int = 1,
    rng: np.random.Generator | None = None,
) -> Measurement:
    """Measure the ranks of a task's plans in rounds, all on the same ids.

    Args:
        predicted: predicted costs of the plans, whose exchanges are added to what is measured.
        rounds, rng: see `RankBench.measure_rounds`.
    """
    ranks = [shards for plan in plans.values() for shards in plan.shards_by_rank()]
    measured = iter(bench.measure_rounds(ranks, ids, rounds=rounds, rng=rng))
    rounds_ms, costs = {}, {}
    for sharder in plans:
        cost = predicted[sharder]
        by_rank = [next(measured) for _ in cost.per_rank]
        computation_ms = np.array([[c.computation_ms for c in times] for times in by_rank])
        exchange_ms = np.array([rank_cost.exchange_ms for rank_cost in cost.per_rank])
        rounds_ms[sharder] = tuple((computation_ms + exchange_ms[:, None]).max(axis=0).tolist())
        costs[sharder] = with_measured(cost, by_rank)
    return Measurement(rounds_ms, costs)


def _kept(fields: Mapping[str, Any]) -> tuple[str, Measurement]:
    return str(fields["key"]), read_form(fields["measurement"], Measurement, name="a measurement")
