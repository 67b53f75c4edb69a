"""Words for recorded steps: where their time goes, and what stands out."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dlrm_sharded.files.text_table import Column, TextTable
from dlrm_sharded.plans.plan_cost import COMPUTE_STAGES, FWD_COMM, FWD_COMPUTE, INPUT_DIST
from dlrm_sharded.step.parts import (
    DATA,
    DENSE_BACKWARD,
    DENSE_FORWARD,
    EXCHANGES,
    PART_LABELS,
    PARTS,
    WAITING,
)
from dlrm_sharded.tracing.findings import (
    CostlyPart,
    Findings,
    Operator,
    SlowExchange,
    Straggler,
    costliest_operators,
)
from dlrm_sharded.tracing.recorded import BETWEEN_STEPS, Lateness, RecordedRank, RecordedSteps

TABLE_PARTS = (INPUT_DIST, *COMPUTE_STAGES)
"""Parts whose time depends on the tables that a rank has."""

MAX_RANKS = 16
"""Largest number of ranks in a table, those that wait longest."""

TablesOfRank = Callable[[int], Sequence[str]]
"""Returns the tables that weigh most on a rank, the heaviest first."""


def summary_lines(steps: RecordedSteps, *, clock_uncertainty_ms: float) -> list[str]:
    """Return where the time of the mean step goes."""
    found = steps.breakdown
    mean = found.mean_parts_ms
    parts = sorted((part for part in PARTS if mean[part] > 0), key=lambda part: -mean[part])
    waiting = found.parts_ms[WAITING]
    exposed_ms = sum(mean[part] for part in EXCHANGES)
    lines = [
        f"a traced step takes {found.step_ms:.2f} ms: "
        + ", ".join(f"{PART_LABELS[part]} {mean[part]:.2f}" for part in parts),
        f"ranks exchange for {exposed_ms:.2f} ms without computing, and wait for other ranks for "
        f"{mean[WAITING]:.2f} ms on average; rank {int(waiting.argmax())} waits longest, "
        f"{waiting.max():.2f} ms",
    ]
    if clock_uncertainty_ms:
        lines.append(
            f"the clocks of the hosts are compared to within {clock_uncertainty_ms:.3f} ms; "
            "shorter waits are not known"
        )
    return lines


def finding_lines(findings: Findings, tables_of_rank: TablesOfRank) -> list[str]:
    """Return a sentence for each finding, or one that says that there is none."""
    if findings.is_empty:
        return ["no rank, exchange or part stands out"]
    return [
        *(_straggler_line(found, tables_of_rank) for found in findings.stragglers),
        *(_slow_line(found) for found in findings.slow_exchanges),
        *(_costly_line(found) for found in findings.costly_parts),
    ]


def _straggler_line(found: Straggler, tables_of_rank: TablesOfRank) -> str:
    line = (
        f"the other ranks wait for rank {found.rank} for {found.waiting_ms:.2f} ms a step, mostly "
        f"in {_named(found.exchange)}"
    )
    late = found.late_with
    if late is None:
        return line
    return f"{line}; {_late_text(late, tables_of_rank(found.rank))}"


def _late_text(late: Lateness, tables: Sequence[str]) -> str:
    longer = f"{late.excess_ms:.2f} ms longer than the others"
    if late.part == BETWEEN_STEPS:
        return f"it begins its steps {late.excess_ms:.2f} ms after the others"
    if late.part == DATA:
        return f"it reads its batches {longer} (the dataset, not its tables)"
    if late.part in TABLE_PARTS:
        heaviest = ", ".join(tables) if tables else "none"
        return f"{_named(late.part)} takes it {longer} (its heaviest tables: {heaviest})"
    return f"{_named(late.part)} takes it {longer} (not its tables)"


def _slow_line(found: SlowExchange) -> str:
    return (
        f"{_named(found.part)} is slow: {found.transfer_ms:.2f} ms after all ranks have come to "
        f"it, {found.expected_ms:.2f} ms when measured before the training; look at the link "
        "between the ranks, and at what else takes the cores of their hosts"
    )


def _costly_line(found: CostlyPart) -> str:
    operators = ", ".join(_operator_text(operator) for operator in found.operators)
    is_dense = found.part in (DENSE_FORWARD, DENSE_BACKWARD)
    by_itself = "the products of its weights take" if is_dense else "when measured before"
    return (
        f"{_named(found.part)} is costly on rank {found.rank}: {found.part_ms:.2f} ms, "
        f"{found.part_ms - found.expected_ms:.2f} ms more than {by_itself}; most of it is "
        f"{operators}"
    )


def _operator_text(operator: Operator) -> str:
    name = operator.name or "Python"
    place = f" in {operator.module}" if operator.module else ""
    return f"{name}{place} {operator.ms:.2f} ms"


def _named(part: str) -> str:
    names = {INPUT_DIST: "the redistribution of ids", FWD_COMPUTE: "the lookup"}
    names |= {FWD_COMM: "the exchange of pooled vectors"}
    return names.get(part, f"the {PART_LABELS[part]}")


def table(steps: RecordedSteps, ranks: Sequence[RecordedRank]) -> str:
    """Return the parts by rank, and the costliest operators of each part, as Markdown."""
    parts_ms = steps.breakdown.parts_ms
    waiting = parts_ms[WAITING]
    shown = sorted(sorted(range(len(ranks)), key=lambda rank: -float(waiting[rank]))[:MAX_RANKS])
    by_rank = TextTable(
        ["ms a step", *(Column(f"rank {rank}", ".2f") for rank in shown)],
        [[PART_LABELS[part], *parts_ms[part][shown].tolist()] for part in PARTS],
    )
    operators = {part: costliest_operators(ranks[0], part) for part in PARTS}
    named = TextTable(
        ["part", "costliest operators of rank 0"],
        [
            (PART_LABELS[part], ", ".join(f"`{_operator_text(one)}`" for one in costliest))
            for part, costliest in operators.items()
            if costliest
        ],
    )
    return f"{by_rank.markdown()}\n\n{named.markdown()}"
