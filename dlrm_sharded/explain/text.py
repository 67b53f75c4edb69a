"""Put a plan, its cost and its diagnosis into words, for terminals and TensorBoard."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dlrm_sharded.explain.shard_shares import ShardShare, shares_of_rank
from dlrm_sharded.files.text_table import Column, TextTable, quantity, span
from dlrm_sharded.plans.plan import ShardingPlan
from dlrm_sharded.plans.plan_cost import STAGES, PlanCost
from dlrm_sharded.plans.plan_report import (
    Alternative,
    Diagnosis,
    PlanReport,
    ProfileValue,
    RankCost,
    ShardCost,
)
from dlrm_sharded.plans.precision import ExchangePrecision
from dlrm_sharded.plans.tables import Table
from dlrm_sharded.plans.task import GIB, ShardingTask

STAGE_TITLES = tuple(stage.replace("_", " ") for stage in STAGES)
MAX_SHOWN = 8
"""Largest number of splits or tables in a list; half as many shards are listed for a rank."""


def forecast(report: PlanReport) -> str | None:
    """Write a plan's predicted cost and its gap to the lower bound; None without a prediction."""
    if report.cost is None:
        return None
    text = f"predicted {report.cost.cost_ms:.2f} ms{rounding(report.exchange_precision)}"
    if report.provenance is not None:
        text += f" ({report.provenance.short_text})"
    if report.caveat is not None:
        return f"{text} (see the caveat)"
    if report.gap is None:
        return text
    return f"{text}, at most {100 * report.gap:z.1f} % above the lower bound"


def plan_lines(plan: ShardingPlan, report: PlanReport, task: ShardingTask) -> list[str]:
    """Write how a plan was made and what is known about it, for a log."""
    used = [size / GIB for size in plan.bytes_by_rank(task.topology)]
    lines = [
        f"{report.made_by}: {_shards_of_tables(plan, task)}"
        f"{_counted(plan.replicated_tables, 'replicated table')}"
        f"{_counted(plan.half_tables(), 'table', ' in fp16')} in {report.solve_s:.3f} s",
        forecast(report),
        f"{span(used, '.2f')} GiB a rank, of {task.topology.rank_memory_text}",
        None if report.profile_value is None else profile_value_text(report.profile_value),
    ]
    return [line for line in lines if line is not None]


def rounding(precision: ExchangePrecision) -> str:
    """Write what the exchanges are rounded to, to be appended to a text; nothing for fp32."""
    return "" if precision.is_exact else f" with exchanges in {precision}"


def _shards_of_tables(plan: ShardingPlan, task: ShardingTask) -> str:
    """Write the numbers of shards and tables, of sequences if there are any, and of modules."""
    sequences = sum(not table.pooled for table in task.tables)
    modules = len({(table.module, table.pooled) for table in task.tables})
    text = f"{quantity(len(plan.shards), 'shard')} of {quantity(len(task.tables), 'table')}"
    text += f" ({quantity(sequences, 'sequence')})" if sequences else ""
    return text + (f", in {modules} modules" if modules > 1 else "")


def _kind(table: Table) -> str:
    """Write whether a table is a sequence, and its module, to be appended to its name."""
    words = ("" if table.pooled else "sequence", f"of {table.module}" if table.module else "")
    text = " ".join(filter(None, words))
    return f" ({text})" if text else ""


def _counted(names: Sequence[str], what: str, kind: str = "") -> str:
    """Write how many tables are of a kind, to be appended to a text; nothing for none."""
    return f", {quantity(len(names), what)}{kind}" if names else ""


def profile_value_text(value: ProfileValue) -> str:
    """Write what the plan may cost under possible profiles, and what measured ones are worth."""
    text = (
        "depending on the skew of unmeasured accesses, the plan costs "
        f"{value.least_ms:.2f} to {value.most_ms:.2f} ms"
    )
    if value.gain is None:
        return text
    return (
        f"{text}; a search that knows them finds plans that cost {100 * value.gain:.1f} % less "
        "on average (plan from data, or from the task.json of a run, to have them measured)"
    )


def sections(diagnosis: Diagnosis) -> dict[str, list[str]]:
    """Put a diagnosis into lines, by title."""
    result = {
        "Ranks that bound the cost": [_bounding(diagnosis), *map(_rank, diagnosis.bounding)],
        "Gains of splits": _splits(diagnosis),
    }
    if diagnosis.alternatives:
        cost_ms, same_task_ms = diagnosis.cost_ms, diagnosis.alternatives[0].cost_ms
        result["Gains of alternatives"] = [
            f"A short search without constraints finds these costs, against {cost_ms:.2f} ms now:",
            _alternative(diagnosis.alternatives[0], cost_ms, None),
            *(_alternative(other, cost_ms, same_task_ms) for other in diagnosis.alternatives[1:]),
        ]
    return result


def _bounding(diagnosis: Diagnosis) -> str:
    num_shown, num_bounding = len(diagnosis.bounding), diagnosis.num_bounding
    shown = f"; the {num_shown} slowest" if num_shown < num_bounding else ""
    slowest = f"Predicted within 1 % of the slowest rank's {diagnosis.cost_ms:.2f} ms"
    return f"{slowest}: {num_bounding} of {diagnosis.world_size} ranks{shown}"


def _rank(rank: RankCost) -> str:
    shown, others = rank.shards[: MAX_SHOWN // 2], rank.shards[MAX_SHOWN // 2 :]
    parts = [f"{_named(shard)} {shard.cost_ms:.2f} ms" for shard in shown]
    if others:
        parts.append(f"{len(others)} more {sum(shard.cost_ms for shard in others):.2f} ms")
    parts.append(f"not due to its tables {rank.overhead_ms:z.2f} ms")
    return f"rank {rank.rank}, {rank.cost_ms:.2f} ms: {', '.join(parts)}"


def _named(cost: ShardCost) -> str:
    shard, table = cost.shard, cost.table
    part = ""
    if shard.replicated:
        part = " (replica)"
    elif shard.num_rows < table.num_embeddings:
        part = " (rows {:,} to {:,})".format(*shard.rows)
    elif shard.num_cols < table.embedding_dim:
        part = " (columns {:,} to {:,})".format(*shard.cols)
    return f"{shard.table}{_kind(table)}{part}"


def _splits(diagnosis: Diagnosis) -> list[str]:
    """Write gains; a gain is below 0 if the plan would cost less with the table whole."""
    if not diagnosis.num_split:
        return ["No table is split."]
    gains = [(f"{s.table} in {s.num_shards} {s.kind}", s.gain_ms) for s in diagnosis.splits]
    known = [(pieces, f"{ms:z.2f} ms") for pieces, ms in gains if ms is not None]
    too_large = [pieces for pieces, ms in gains if ms is None]
    lines = []
    if known:
        lines.append(
            "Extra cost of the plan if a table were whole, on the rank where that costs least:"
        )
        lines += [f"{pieces}: {gain}" for pieces, gain in known[:MAX_SHOWN]]
    if others := known[MAX_SHOWN:]:
        lines.append(f"{len(others)} more: {others[0][1]} to {others[-1][1]}")
    if too_large:
        more = f" and {len(too_large) - MAX_SHOWN} more" if len(too_large) > MAX_SHOWN else ""
        lines.append(f"{', '.join(too_large[:MAX_SHOWN])}{more}: fits no rank whole")
    if left := diagnosis.num_split - len(diagnosis.splits):
        lines.append(f"split tables not looked at: {left}")
    return lines


def _alternative(other: Alternative, cost_ms: float, same_task_ms: float | None) -> str:
    """Write what an alternative costs, and what it gains over another plan without the change.

    Args:
        same_task_ms: cost of another plan of the unchanged task; None if there is none.
    """
    if other.cost_ms is None:
        return f"{other.change}: nothing found"
    less = 100 * (1 - other.cost_ms / cost_ms)
    text = f"{other.change}: {other.cost_ms:.2f} ms, {less:.1f} % less"
    if same_task_ms is None:
        return text
    share = 100 * (1 - other.cost_ms / same_task_ms)
    gain = "no gain over" if share < 0.05 else f"{share:.1f} % less than"
    return f"{text}; {gain} another plan without it"


def explain(
    plan: ShardingPlan, report: PlanReport, task: ShardingTask, cost: PlanCost | None
) -> str:
    """Write a plan as Markdown: ranks, then the shards of every rank, the slowest rank first.

    Args:
        cost: measured cost; None if nothing was measured.
    """
    shares = {rank: shares_of_rank(plan, task, rank, cost) for rank in range(plan.world_size)}
    slowest_first = list(shares)
    lines = [
        f"**{report.made_by}**: {_shards_of_tables(plan, task)} on "
        f"{quantity(plan.world_size, 'rank')}, "
        f"{sum(plan.bytes_by_rank(task.topology)) / GIB:.3f} GiB"
        f"{_counted(plan.half_tables(), 'table', ' in fp16')}{rounding(plan.exchange_precision)}."
    ]
    if plan.replicated_tables:
        lines.append(f"Every rank has a replica of {', '.join(plan.replicated_tables)}.")
    if report.caveat is not None:
        lines += ["", f"**Caveat**: {report.caveat}.", ""]
    if report.provenance is not None:
        lines += ["", f"**Cost model**: {report.provenance.text}.", ""]
    if cost is not None:
        slowest_first.sort(key=lambda rank: -cost.per_rank[rank].total_ms)
        slowest = slowest_first[0]
        if top := shares[slowest][:3]:
            blame = ", ".join(f"{share.table.name} ({share.cost_ms:.2f} ms)" for share in top)
            lines.append(
                f"Rank {slowest} is the slowest with {cost.per_rank[slowest].total_ms:.2f} ms "
                f"({cost.imbalance:.2f} x the mean); its largest parts: {blame}."
            )
        if report.cost is not None:
            lines += ["", _prediction_table(report.cost, cost).markdown()]
    if report.diagnosis is not None:
        lines += [] if report.cost is None else ["", f"It is {forecast(report)}."]
        for title, texts in sections(report.diagnosis).items():
            lines += ["", f"**{title}**", "", *(f"- {text}" for text in texts)]
    lines += [
        "",
        _ranks_table(shares, cost).markdown(),
        "",
        "A shard's cost is its share of its rank's: of computation by columns read, "
        "of communication by columns.",
        "",
        _shards_table({rank: shares[rank] for rank in slowest_first}).markdown(),
    ]
    return "\n".join(lines)


def _ranks_table(
    shares_by_rank: Mapping[int, Sequence[ShardShare]], cost: PlanCost | None
) -> TextTable:
    columns = (
        *("rank", "shards", Column("GiB", ".3f"), "columns"),
        *(Column("columns read per sample", ",.0f"), Column("cost ms", ".2f")),
    )
    rows = [
        (
            rank,
            len(shares),
            sum(share.size_bytes for share in shares) / GIB,
            sum(share.shard.num_cols for share in shares),
            sum(share.work for share in shares),
            None if cost is None else cost.per_rank[rank].total_ms,
        )
        for rank, shares in shares_by_rank.items()
    ]
    return TextTable(columns, rows)


def _shards_table(shares_by_rank: Mapping[int, Sequence[ShardShare]]) -> TextTable:
    columns = (
        *("rank", "table", "rows", "columns", Column("ids per sample", ".1f")),
        *(Column("MiB", ".1f"), Column("cost ms", ".2f")),
    )
    rows = [
        (
            rank,
            f"{share.table.name}{_kind(share.table)}",
            "{:,} to {:,}".format(*share.shard.rows),
            "{:,} to {:,}".format(*share.shard.cols),
            share.table.pooling_factor,
            share.size_bytes / 2**20,
            share.cost_ms,
        )
        for rank, shares in shares_by_rank.items()
        for share in shares
    ]
    return TextTable(columns, rows)


def difference(predicted_ms: float, measured_ms: float) -> str:
    """Write the error of the prediction as a share of the measured time."""
    if measured_ms <= 0:
        return "-"
    return f"{100 * (predicted_ms / measured_ms - 1):+z.0f} %"


def _prediction_table(predicted: PlanCost, measured: PlanCost) -> TextTable:
    times = {
        label: (predicted.stage_max_ms(stage), measured.stage_max_ms(stage))
        for stage, label in zip(STAGES, STAGE_TITLES, strict=True)
    }
    times["critical path"] = predicted.critical_path_ms, measured.critical_path_ms
    times["embedding cost"] = predicted.cost_ms, measured.cost_ms
    columns = ("predicted ms", "measured ms")
    return TextTable(
        ["stage (max over ranks)", *(Column(name, ".2f") for name in columns), "difference"],
        [(name, a, b, difference(a, b)) for name, (a, b) in times.items()],
    )
