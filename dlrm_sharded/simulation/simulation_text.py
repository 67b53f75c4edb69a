"""Texts on simulated clusters: what was measured, what is predicted, and a table of sharders."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from dlrm_sharded.explain.step_text import needs_text, parts_text
from dlrm_sharded.files.text_table import TextTable
from dlrm_sharded.plans.standing import Standing
from dlrm_sharded.plans.task import GIB, ShardingTask
from dlrm_sharded.simulation.ranks import MEASURED, MEASUREMENTS, SCALED
from dlrm_sharded.simulation.run import SimulatedRun
from dlrm_sharded.step.breakdown import Wait
from dlrm_sharded.step.parts import PART_LABELS, WAITING

MAX_WAITS = 3
"""Exchanges that are named with the ranks that the others wait for."""

LEAST_WAIT = 0.005
"""Share of the step below which a wait is not named."""


BUSY = 0.05
"""Share of the time of measurements, in which other processes had the core, that is named."""


def heading_text(
    task: ShardingTask, standing: Standing | None, *, gpu: str | None, measured_on: str
) -> str:
    """Write what was measured and what is predicted.

    Args:
        standing: origin of the prices; None if it is not known.
        gpu: name of the GPU whose prior prices the lookups; None if they were measured.
        measured_on: what they were measured on.
    """
    topology = task.topology
    num_hosts = topology.world_size // topology.ranks_per_host
    cluster = (
        f"{topology.world_size:,} ranks on {counted(num_hosts, 'host')}, "
        f"{len(task.tables):,} tables, global batch {task.batch_size:,}"
    )
    prices = "no standing" if standing is None else standing.short_text
    if gpu is not None:
        return (
            f"predicted by the prior of {gpu}, nothing was measured: {cluster}. Prices: {prices}."
        )
    if standing is not None:
        prices = f"prices of {standing.hardware}: {prices}"
    return (
        f"simulated, lookups measured on {measured_on}, one rank after another: {cluster}. The "
        f"exchanges and the all-reduce are predicted ({prices}), and the waits follow from all of "
        "these."
    )


def counted(number: int, noun: str) -> str:
    """Write a number of things: 1 rank, 8 ranks."""
    return f"{number:,} {noun}{'s' * (number > 1)}"


def one_line(message: str) -> str:
    """Write a message as the cell of a table."""
    return " ".join(message.split()).replace("|", "/")


def summary(
    heading: str, notes: Sequence[str], runs: Sequence[SimulatedRun], failed: Mapping[str, str]
) -> str:
    """Write a whole simulation as Markdown."""
    lines = ["# Simulated cluster", "", heading, ""]
    lines += [f"- {note}" for note in notes] + [""] * bool(notes)
    lines += [*comparison(runs, failed), ""]
    lines += [line for tie in host_tie(runs) for line in (tie, "")]
    for run in runs:
        lines += [f"## {run.planned.sharder}", "", *(f"- {line}" for line in details(run)), ""]
    return "\n".join(lines)


def simulation_lines(
    heading: str, notes: Sequence[str], runs: Sequence[SimulatedRun], failed: Mapping[str, str]
) -> Iterator[str]:
    """Yield what the terminal shows of it: the heading, the comparison, each sharder's details."""
    yield "\n".join([heading, *(f"note: {note}" for note in notes)])
    yield "\n".join(["sharders:", *comparison(runs, failed), *host_tie(runs)])
    for run in runs:
        yield f"{run.planned.sharder}: " + "\n  ".join(details(run))


def comparison(runs: Sequence[SimulatedRun], failed: Mapping[str, str]) -> list[str]:
    """Return the lines of a table with a row for each sharder, the fastest first."""
    on_gpus = any(run.step.host is not None for run in runs)
    titles = (
        *("sharder", "step ms", *(("GPUs ms", "host ms") if on_gpus else ()), "samples/s"),
        *("waiting ms (mean)", "embedding cost ms"),
        "its prediction ms",
        *("imbalance", "tables GiB (max)", "memory GiB (max)", "lookups"),
    )
    rows: list[list[object]] = [
        [
            run.planned.sharder,
            f"{run.step.step_ms:.1f}{_error_bar(run.step.error)}",
            *([] if run.step.host is None else map(_ms, (run.step.device_ms, run.step.host.ms))),
            f"{run.step.samples_per_s:,.0f}",
            f"{run.step.breakdown.mean_ms(WAITING):.1f}",
            f"{run.cost.cost_ms:.1f}",
            f"{run.planned.cost.cost_ms:.1f}",
            f"{run.cost.imbalance:.2f}",
            f"{max(run.table_bytes) / GIB:.2f}",
            f"{max(run.memory_bytes) / GIB:.2f}",
            ", ".join(f"{count:,} {origin}" for origin, count in run.origins.items()),
        ]
        for run in sorted(runs, key=lambda run: (run.step.step_ms, run.step.device_ms))
    ]
    rows += [
        [name, f"no plan: {one_line(message)}", *[""] * (len(titles) - 2)]
        for name, message in failed.items()
    ]
    return TextTable(titles, rows).markdown().splitlines()


def host_tie(runs: Sequence[SimulatedRun]) -> list[str]:
    """Return a sentence on sharders whose steps are alike as the host bounds them, if any are."""
    bound = [run.planned.sharder for run in runs if run.step.bounding_host]
    if len(bound) < 2:
        return []
    return [
        f"The host bounds the steps of {', '.join(bound)}: whatever their GPUs need, they tie, up "
        "to the host's time for further lookups of a rank. A larger batch, or compiled layers "
        "(model.compile_mode), would tell them apart."
    ]


def _ms(milliseconds: float) -> str:
    return f"{milliseconds:.1f}"


def _error_bar(error: float | None) -> str:
    return f" ± {100 * error:.0f} %" if error else ""


def details(run: SimulatedRun) -> list[str]:
    """Return sentences on what the step goes to, and which ranks the others wait for."""
    lines = [f"The step takes {run.step.step_ms:.1f} ms: {parts_text(run.step.breakdown)} ms."]
    if (needs := needs_text(run.step)) is not None:
        lines.append(f"It is {needs}.")
    lines += [
        _wait_text(run, wait)
        for wait in run.step.breakdown.waits[:MAX_WAITS]
        if wait.waiting_ms.mean() > LEAST_WAIT * run.step.step_ms
    ]
    if run.origins.get(SCALED):
        lines.append(
            f"{run.origins[SCALED]:,} ranks were not measured: their lookups are predicted, and "
            "scaled by what a random sample of ranks took relative to its prediction."
        )
    if again := sum(times.measurements > 1 for times in run.ranks if times.origin == MEASURED):
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
    shards = [shard for shard in run.planned.plan.shards if shard.rank == wait.cause]
    pooling = {table.name: table.pooling_factor for table in run.task.tables}
    costliest = max(shards, key=lambda s: s.num_cols * pooling[s.table], default=None)
    count = "one shard," if len(shards) == 1 else f"{len(shards)} shards, such as"
    holds = "has no shards" if costliest is None else f"has {count} {costliest}"
    return (
        f"Before {PART_LABELS.get(wait.operation, wait.operation)}, ranks wait "
        f"{wait.waiting_ms.mean():.1f} ms on average, {wait.caused_ms:.1f} ms of it for rank "
        f"{wait.cause}, whose lookups and updates take {own_ms:.1f} ms (mean of all ranks "
        f"{mean_ms:.1f} ms); it {holds}."
    )
