"""Texts on simulated clusters: what was measured, what is predicted, and a table of sharders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dlrm_sharded.explain.step_text import parts_text
from dlrm_sharded.files.markdown import markdown_table
from dlrm_sharded.plans.task import GIB, ShardingTask
from dlrm_sharded.simulation.cluster import SimulatedRun
from dlrm_sharded.simulation.ranks import MEASURED, MEASUREMENTS, SCALED
from dlrm_sharded.step.breakdown import Wait
from dlrm_sharded.step.parts import PART_LABELS, WAITING

MAX_WAITS = 3
"""Exchanges that are named with the ranks that the others wait for."""

LEAST_WAIT = 0.005
"""Share of the step below which a wait is not named."""


BUSY = 0.05
"""Share of the time of measurements, in which other processes had the core, that is named."""


def cluster_text(task: ShardingTask) -> str:
    """Write the ranks, the hosts and the batch of a task."""
    topology = task.topology
    num_hosts = topology.world_size // topology.ranks_per_host
    return (
        f"{topology.world_size:,} ranks on {num_hosts:,} host{'s' * (num_hosts > 1)}, "
        f"{len(task.tables):,} tables, global batch {task.batch_size:,}"
    )


def measured_heading(task: ShardingTask, *, device: str, threads: int, prices: str) -> str:
    """Write the heading of a simulation whose lookups ran on a device."""
    of_threads = f" with {threads} thread{'s' * (threads > 1)}" if device.startswith("cpu") else ""
    return (
        f"simulated, lookups measured on {device}{of_threads}, one rank after another: "
        f"{cluster_text(task)}. The exchanges and the all-reduce are predicted ({prices}), and the "
        "waits follow from all of these."
    )


def priced_heading(task: ShardingTask, *, gpu: str, prices: str) -> str:
    """Write the heading of a simulation in which nothing ran."""
    return (
        f"predicted by the prior of {gpu}, nothing was measured: {cluster_text(task)}. "
        f"Prices: {prices}."
    )


def summary(
    heading: str, notes: Sequence[str], runs: Sequence[SimulatedRun], failed: Mapping[str, str]
) -> str:
    """Write a whole simulation as Markdown."""
    lines = ["# Simulated cluster", "", heading, ""]
    lines += [f"- {note}" for note in notes] + [""] * bool(notes)
    lines += [*comparison(runs, failed), ""]
    for run in runs:
        lines += [f"## {run.sharder}", "", *(f"- {line}" for line in details(run)), ""]
    return "\n".join(lines)


def comparison(runs: Sequence[SimulatedRun], failed: Mapping[str, str]) -> list[str]:
    """Return the lines of a table with a row for each sharder, the fastest first."""
    titles = (
        *("sharder", "step ms", "samples/s", "waiting ms (mean)", "embedding cost ms"),
        "its prediction ms",
        *("imbalance", "tables GiB (max)", "memory GiB (max)", "lookups"),
    )
    rows: list[list[object]] = [
        [
            run.sharder,
            f"{run.step_ms:.1f}" + (f" ± {100 * run.error:.0f} %" if run.error else ""),
            f"{run.samples_per_s:,.0f}",
            f"{run.breakdown.mean_ms(WAITING):.1f}",
            f"{run.cost.cost_ms:.1f}",
            f"{run.predicted.cost_ms:.1f}",
            f"{run.cost.imbalance:.2f}",
            f"{max(run.plan.bytes_by_rank(run.task.topology)) / GIB:.2f}",
            f"{max(memory.total for memory in run.memory) / GIB:.2f}",
            origins_text(run),
        ]
        for run in sorted(runs, key=lambda run: run.step_ms)
    ]
    rows += [
        [name, f"no plan: {_one_line(message)}", *[""] * (len(titles) - 2)]
        for name, message in failed.items()
    ]
    return markdown_table(titles, rows)


def origins_text(run: SimulatedRun) -> str:
    """Write how the ranks' computation is known: 128 measured, 896 scaled."""
    return ", ".join(f"{count:,} {origin}" for origin, count in run.origins.items())


def details(run: SimulatedRun) -> list[str]:
    """Return sentences on what the step goes to, and which ranks the others wait for."""
    lines = [f"The step takes {run.step_ms:.1f} ms: {parts_text(run.breakdown)} ms."]
    lines += [
        _wait_text(run, wait)
        for wait in run.breakdown.waits[:MAX_WAITS]
        if wait.waiting_ms.mean() > LEAST_WAIT * run.step_ms
    ]
    if run.origins.get(SCALED):
        lines.append(
            f"{run.origins[SCALED]:,} ranks were not measured: their lookups are predicted, and "
            "scaled by what a random sample of ranks took relative to its prediction."
        )
    again = sum(times.measurements > 1 for times in run.ranks if times.origin == MEASURED)
    if again:
        lines.append(
            f"Ranks that computed longest were measured up to {MEASUREMENTS} times ({again:,} of "
            "them), and medians count: no disturbed measurement decides the step."
        )
    if run.core_wait_share > BUSY:
        lines.append(
            f"Other processes had the core for {100 * run.core_wait_share:.0f} % of the time of "
            "the measurements: the machine is busy, and lookups are faster than this says."
        )
    if run.num_folded:
        lines.append(
            f"On {run.num_folded:,} ranks, tables had fewer rows than in the plan, because they do "
            "not fit the memory of this machine (table_gib); their ids are modulo those rows, "
            "which caches find more often."
        )
    return lines


def _wait_text(run: SimulatedRun, wait: Wait) -> str:
    stages = run.cost.per_rank
    own_ms = stages[wait.cause].computation_ms
    mean_ms = sum(s.computation_ms for s in stages) / len(stages)
    shards = [shard for shard in run.plan.shards if shard.rank == wait.cause]
    pooling = {table.name: table.pooling_factor for table in run.task.tables}
    costliest = max(shards, key=lambda s: s.num_cols * pooling[s.table], default=None)
    holds = "has no shards" if costliest is None else f"has {_shards_text(len(shards))}{costliest}"
    return (
        f"Before {PART_LABELS.get(wait.operation, wait.operation)}, ranks wait "
        f"{wait.waiting_ms.mean():.1f} ms in the mean, {wait.caused_ms:.1f} ms of it for rank "
        f"{wait.cause}, whose lookups and updates take {own_ms:.1f} ms (mean of all ranks "
        f"{mean_ms:.1f} ms); it {holds}."
    )


def _shards_text(count: int) -> str:
    return "one shard, " if count == 1 else f"{count} shards, such as "


def _one_line(message: str) -> str:
    return " ".join(message.split()).replace("|", "/")
