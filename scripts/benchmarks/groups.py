"""Groups of ranks, each with all tables, beside one plan for all ranks, by the prior of a GPU.

TorchRec's `DMPCollection` shards a model within groups of G of W ranks, and each group trains on
G / W of the samples. `sync()` then averages the weights and the optimizer state of the W / G ranks
that hold the same shards: an all-reduce of all bytes of their tables that nothing hides. TorchRec's
pipeline has one after every `dmp_collection_sync_interval_batches` steps, by default after each.
Between two of them the groups train apart, which is another training than that of one copy.

Searches for plans of hundreds of tables and ranks end by their time, so gains are over the lower
bound of all plans for all ranks: what groups gain at least.

The groups are contiguous ranks (`use_inter_host_allreduce=True`: exchanges stay in few hosts and
averages cross hosts) or interleaved ones (its default: averages stay in a host if they can).
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence

from benchmarks.mlperf_steps import MLPERF_BATCH_SIZES, mlperf_task, prior_model
from benchmarks.planners import neuroshard, on_device
from dlrm_sharded.cost.bound import lower_bound_ms
from dlrm_sharded.cost.exchange_curves import EvenVolumes
from dlrm_sharded.datasets.presets import t510
from dlrm_sharded.datasets.task_sets import PRODUCTION_SIZE, scaling_task
from dlrm_sharded.files.errors import ShardingError
from dlrm_sharded.files.text_table import Column, TextTable
from dlrm_sharded.hardware.gpus.gpu_specs import GpuSpec, gpu_specs
from dlrm_sharded.plans.plan import ShardingPlan
from dlrm_sharded.plans.task import ShardingTask
from studies.parts import option
from studies.processes import quiet
from studies.study import Case, Row

BASIS = "predicted"
MLPERF, T510, PAPER = MODELS = ("mlperf", "t510", "paper")
CONTIGUOUS, INTERLEAVED = PLACEMENTS = ("contiguous", "interleaved")
LEAST_GROUP = 8
ROOM = 1.1
"""Bytes that a rank of a group may have, over their mean: the fullest one decides the averages."""

WORTHWHILE = 0.05
"""Gain above which groups would be worth their own plans."""

RARELY = 100
"""Number of steps between averages of training that is rarely synchronised."""

OPTIONS = {
    "models": option(MODELS, "mlperf, t510, or 1,000 tables like the paper's"),
    "ranks": option((64, 128, 256), "numbers of GPUs, on hosts of 8"),
    "gpu": option("h100_sxm", "GPU whose prior has the prices", choices=list(gpu_specs())),
    "time_budget_s": option(10.0, "time of the search for a plan"),
}


def task_of_model(model: str, num_gpus: int, spec: GpuSpec) -> ShardingTask:
    """Return the tables of a model on hosts of 8 GPUs, with the batch of MLPerf's submissions."""
    batch_size = MLPERF_BATCH_SIZES.get(num_gpus, max(MLPERF_BATCH_SIZES.values()))
    task = mlperf_task(num_gpus, batch_size, spec)
    if model == T510:
        task = dataclasses.replace(task, tables=t510())
    if model == PAPER:
        task = dataclasses.replace(task, tables=scaling_task(*PRODUCTION_SIZE).tables)
    return on_device(task, "cuda")


def task_of_group(task: ShardingTask, size: int, placement: str) -> ShardingTask:
    """Return the task of one group: all tables, its share of the samples, and its ranks' hosts."""
    topology, num_groups = task.topology, task.topology.world_size // size
    if placement == CONTIGUOUS:
        local_world_size = min(size, topology.ranks_per_host)
    else:
        local_world_size = max(topology.ranks_per_host // num_groups, 1)
    topology = dataclasses.replace(
        topology,
        world_size=size,
        local_world_size=local_world_size,
        memory_bytes=min(topology.memory_bytes, int(ROOM * task.table_bytes / size)),
    )
    return dataclasses.replace(task, topology=topology, batch_size=task.batch_size // num_groups)


def average_ms(
    plan: ShardingPlan, task: ShardingTask, size: int, placement: str, spec: GpuSpec
) -> float:
    """Return the time in which the ranks that hold the same shards average them, state included.

    Args:
        plan: that of one group.
        task: that of all ranks.
    """
    per_row = task.topology.optimizer_bytes_per_row
    num_bytes = [0] * plan.world_size
    for shard in plan.shards:
        num_bytes[shard.rank] += shard.weight_bytes + shard.num_rows * per_row
    num_groups, per_host = task.topology.world_size // size, 1
    if placement == INTERLEAVED:
        per_host = min(num_groups, task.topology.ranks_per_host)
    volume = max(num_bytes) / num_groups
    even = EvenVolumes(num_groups, per_host, volume=volume, id_volume=1.0)
    curves = prior_model(spec).exchange_curves
    assert curves is not None
    return sum(curves.ring_ms(half, volume, even) for half in ("reduce_scatter", "all_gather"))


def cases(options: argparse.Namespace) -> Iterator[Case]:
    for model in options.models:
        for num_gpus in options.ranks:
            yield Case(f"{model} {num_gpus}", functools.partial(_rows, model, num_gpus, options))


def _rows(model: str, num_gpus: int, options: argparse.Namespace) -> list[Row]:
    """Return a row for one plan of all ranks, then one for each group size and placement."""
    quiet()
    spec = gpu_specs()[options.gpu]
    task, prices = task_of_model(model, num_gpus, spec), prior_model(spec)
    sharder = neuroshard(prices, time_budget_s=options.time_budget_s)

    def row(size: int, placement: str | None) -> Row:
        bound_ms = None
        found: Row = {"model": model, "num_gpus": num_gpus, "size": size, "placement": placement}
        of_group = task if placement is None else task_of_group(task, size, placement)
        try:
            plan = sharder.shard(of_group)
        except ShardingError as error:
            return found | {"cost_ms": None, "error": str(error)}
        if placement is None:
            bound_ms = lower_bound_ms(prices.price(task))
        cost = prices.predict(plan, of_group)
        waited_ms = 0.0 if placement is None else average_ms(plan, task, size, placement, spec)
        return found | {
            "cost_ms": cost.cost_ms,
            "bound_ms": bound_ms,
            "average_ms": waited_ms,
        }

    rows, size = [row(num_gpus, None)], LEAST_GROUP
    while size < num_gpus:
        rows += [row(size, placement) for placement in PLACEMENTS]
        size *= 2
    return rows


def steps_for(gain: float, bound_ms: float, cost_ms: float, average_ms: float) -> float:
    """Return the number of steps between averages from which a group costs less by a gain."""
    left_ms = (1 - gain) * bound_ms - cost_ms
    return math.ceil(average_ms / left_ms) if left_ms > 0 else math.inf


def report(rows: Sequence[Row], reference: str | None) -> str:
    """Write the costs of groups and of their averages, against the bound of one plan."""
    lines = []
    for row in rows:
        if row["placement"] is None:
            bound_ms = row.get("bound_ms")
        cells = [row["model"], row["num_gpus"], row["placement"] or "all ranks", row["size"]]
        if row["cost_ms"] is None or bound_ms is None or row["placement"] is None:
            lines.append([*cells, row["cost_ms"], row.get("bound_ms"), *[None] * 5])
            continue
        cost_ms, average_ms = row["cost_ms"], row["average_ms"]
        gains = [
            100 * (1 - (cost_ms + average_ms / steps) / bound_ms) for steps in (1, RARELY, math.inf)
        ]
        steps = steps_for(WORTHWHILE, bound_ms, cost_ms, average_ms)
        lines.append(
            [*cells, cost_ms, None, average_ms, *gains, steps if steps < math.inf else None]
        )
    titles = ("every step", f"every {RARELY} steps", "never")
    columns: tuple[Column | str, ...] = (
        *("model", "GPUs", "groups", "ranks of a group"),
        *(Column("cost, ms", ".2f"), Column("bound, ms", ".2f"), Column("average, ms", ",.0f")),
        *(Column(f"gain, %: averaged {title}", ",.0f") for title in titles),
        Column(f"steps for {WORTHWHILE:.0%}", ",.0f"),
    )
    return TextTable(columns, lines).markdown()
