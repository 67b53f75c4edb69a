"""The plan in text and plots: who is slow, because of what."""

import dataclasses

import pytest
from matplotlib.figure import Figure

from dlrm_sharded import Shard, ShardingPlan, Table
from dlrm_sharded.explain.figures import plot_cost_by_rank, plot_memory_by_rank
from dlrm_sharded.explain.shard_shares import ShardShare, shares_of_rank
from dlrm_sharded.explain.text import STAGE_TITLES, explain
from dlrm_sharded.plans.plan_cost import STAGES, PlanCost, StageCost
from dlrm_sharded.plans.plan_report import PlanReport
from tests.unit.synthetic import task_of

WIDE = Table("wide", 1000, 128, 1.0)
BUSY = Table("busy", 2000, 16, 40.0)
SPLIT = Table("split", 90, 32, 3.0)
IDLE = Table("idle", 50, 4, 0.0)
TASK = task_of((WIDE, BUSY, SPLIT, IDLE), 3, 10**7, 96, optimizer_bytes_per_row=4)
PLAN = ShardingPlan(
    3,
    (
        Shard.whole(WIDE, 1),
        Shard.whole(BUSY, 1),
        Shard.whole(IDLE, 1),
        Shard("split", 0, (0, 60), (0, 32)),
        Shard("split", 1, (60, 90), (0, 32)),
    ),
)
"""Rank 2 is empty."""

REPORT = PlanReport("test", solve_s=0.1)

LOW, NONE = StageCost(1.0, 0.5, 0.25, 1.25), StageCost(0, 0, 0, 0)
COST = PlanCost((LOW, StageCost(4.0, 2.0, 3.0, 5.0), StageCost(0, 0.5, 0.5, 0)))
PREDICTED = PlanCost((LOW, StageCost(5.0, 1.0, 3.0, 4.0), StageCost(0, 1.5, 0.5, 0)))


def by_table(rank: int, cost: PlanCost | None = COST) -> dict[str, ShardShare]:
    return {share.table.name: share for share in shares_of_rank(PLAN, TASK, rank, cost)}


def section(text: str, title: str) -> list[list[str]]:
    """Cells of one of the Markdown tables, without its head."""
    lines = text.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(title))
    rows: list[list[str]] = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


def test_computation_is_shared_by_work_and_communication_by_columns() -> None:
    shares = by_table(1)
    work = {"wide": 128.0, "busy": 640.0, "split": 32.0, "idle": 0.0}
    assert {name: share.work for name, share in shares.items()} == pytest.approx(work)
    columns = {"wide": 128, "busy": 16, "split": 32, "idle": 4}
    for name, share in shares.items():
        assert share.cost_ms == pytest.approx(9.0 * work[name] / 800 + 5.0 * columns[name] / 180)


COMM_BOUND = PlanCost((NONE, StageCost(0.1, 9.0, 9.0, 0.1), NONE))


@pytest.mark.parametrize(
    ("cost", "blamed"),
    [
        (COST, "busy (7.64 ms), wide (5.00 ms), split (1.25 ms)"),
        (COMM_BOUND, "wide (12.83 ms), split (3.21 ms), busy (1.76 ms)"),
    ],
    ids=["compute_bound", "comm_bound"],
)
def test_names_the_slowest_rank_and_its_tables(cost: PlanCost, blamed: str) -> None:
    line = (
        f"Rank 1 is the slowest with {cost.cost_ms:.2f} ms ({cost.imbalance:.2f} x the mean); "
        f"its largest parts: {blamed}."
    )
    assert line in explain(PLAN, REPORT, TASK, cost).splitlines()
    assert list(by_table(1, None)) == ["busy", "wide", "split", "idle"], "by work without a cost"


def test_lists_ranks_and_shards() -> None:
    text = explain(PLAN, REPORT, TASK, COST)
    assert text.startswith("**test**: 5 shards of 4 tables on 3 ranks, 0.001 GiB.")
    assert section(text, "| rank | shards") == [
        ["0", "1", "0.000", "32", "64", "3.00"],
        ["1", "4", "0.001", "180", "800", "14.00"],
        ["2", "0", "0.000", "0", "0", "1.00"],
    ]
    shards = section(text, "| rank | table")
    places = [tuple(row[:2]) for row in shards]
    on_rank_1 = [("1", name) for name in ("busy", "wide", "split", "idle")]
    assert places == [*on_rank_1, ("0", "split")]
    assert shards[2][2:5] == ["60 to 90", "0 to 32", "3.0"]


def test_predicted_beside_measured() -> None:
    """Each the max over its own ranks; the stages sum to the critical path."""
    text = explain(PLAN, dataclasses.replace(REPORT, cost=PREDICTED), TASK, COST)
    assert section(text, "| stage") == [
        ["fwd compute", "5.00", "4.00", "+25 %"],
        ["fwd comm", "1.50", "2.00", "-25 %"],
        ["bwd comm", "3.00", "3.00", "+0 %"],
        ["bwd compute", "4.00", "5.00", "-20 %"],
        ["critical path", "13.50", "14.00", "-4 %"],
        ["embedding cost", "13.00", "14.00", "-7 %"],
    ]
    assert section(text, "| rank | shards")[1][-1] == "14.00", "of what was measured"
    assert "predicted" not in explain(PLAN, REPORT, TASK, COST)


def bars(figure: Figure) -> list[list[float]]:
    """Widths of the segments, by label and rank."""
    return [[bar.get_width() for bar in group] for group in figure.axes[0].containers]


def legend(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_cost_figure_with_a_prediction() -> None:
    """The same colors, apart from the measured bars and within the axis."""
    longer = PlanCost((*PREDICTED.per_rank[:2], StageCost(0, 60.0, 0.5, 0)))
    figure = plot_cost_by_rank(COST, predicted=longer)
    measured, predicted = bars(figure)[: len(STAGES)], bars(figure)[len(STAGES) :]
    assert measured == bars(plot_cost_by_rank(COST))
    assert measured == [[rank.stage_ms(stage) for rank in COST.per_rank] for stage in STAGES]
    assert predicted == [[rank.stage_ms(stage) for rank in longer.per_rank] for stage in STAGES]
    containers = figure.axes[0].containers
    ends = [bar.get_x() + bar.get_width() for bar in containers[len(STAGES) - 1]]
    assert ends == pytest.approx([rank.total_ms for rank in COST.per_rank])
    for wide, thin in zip(containers[: len(STAGES)], containers[len(STAGES) :], strict=True):
        assert wide[0].get_facecolor() == thin[0].get_facecolor()
        assert wide[0].get_y() + wide[0].get_height() < thin[0].get_y()
        assert thin[0].get_y() + thin[0].get_height() < wide[1].get_y()
    assert figure.axes[0].get_xlim()[1] >= longer.cost_ms
    assert legend(figure) == list(STAGE_TITLES)
    assert "predicted" in figure.axes[0].get_xlabel()
    assert "predicted" not in plot_cost_by_rank(COST).axes[0].get_xlabel()


def test_memory_figure() -> None:
    widths = bars(plot_memory_by_rank(PLAN, TASK))
    assert len(widths) == len(TASK.tables)
    used = [sum(of_rank) * 2**20 for of_rank in zip(*widths, strict=True)]
    assert used == pytest.approx(PLAN.bytes_by_rank(TASK.topology))
