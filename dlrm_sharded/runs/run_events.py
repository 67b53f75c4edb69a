"""Writes a run for TensorBoard; tools outside this repository read its tags."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.hparams.summary_v2 import HParam, Metric, hparams_config_pb, hparams_pb

from dlrm_sharded.explain.text import explain
from dlrm_sharded.plans.plan import ShardingPlan
from dlrm_sharded.plans.plan_cost import STAGES, PlanCost
from dlrm_sharded.plans.plan_report import PlanReport
from dlrm_sharded.plans.task import ShardingTask
from dlrm_sharded.runs.event_file import EventFile

if TYPE_CHECKING:  # loads torch
    from dlrm_sharded.training.result import TrainingResult

THROUGHPUT = "train/samples_per_s/median"
"""Throughput of the whole run, as in result.json; `train/samples_per_s` is that of a few steps."""

HPARAMS = ("sharder", "batch_size", "seed")
COMPARED_METRICS = {
    "embedding/cost_ms": "embedding cost, ms",
    THROUGHPUT: "samples/s",
    "eval/auroc": "AUROC",
}
"""Titles of scalars by tag. With the HParams, these are the columns that fit on one page."""


class RunWriter(EventFile):
    """The event file of a run; its arguments are those of `EventFile`."""

    def __init__(
        self,
        run_dir: Path,
        *,
        enabled: bool,
        going_on: tuple[str, int] | None = None,
        check_owner: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(run_dir, enabled=enabled, going_on=going_on, check_owner=check_owner)
        self._goes_on = going_on is not None
        # TensorBoard cuts the end of a name, and takes equal ones for one trial.
        self._trial = f"{run_dir.name}/{run_dir.parent.name}"
        self._run_scalars: dict[str, float] = {}

    def stall(self, stalled_s: float, step: int, text: str) -> None:
        """Write that no step has ended for so long after a step, and who waits for whom."""
        self.scalar("train/stalled_s", stalled_s, step)
        self.text("train/stall", text, step)

    def run_scalar(self, tag: str, value: float) -> None:
        """Write a figure of the run as a whole."""
        self._run_scalars[tag] = value
        self.scalar(tag, value)

    def conclude(self, result: TrainingResult) -> None:
        """Write the figures of the whole training, then all figures of the run at its last step.

        TensorBoard hides the highest and lowest of single points as outliers, but not of lines.
        """
        self.run_scalar("memory/peak_gib/max", result.peak_gib)
        if result.reserved_gib is not None:
            self.run_scalar("memory/reserved_gib/max", result.reserved_gib)
        if math.isfinite(result.samples_per_s):
            self.run_scalar(THROUGHPUT, result.samples_per_s)
            self.run_scalar("train/samples_per_s/overall", result.samples_per_s_overall)
        for tag, value in self._run_scalars.items():
            self.scalar(tag, value, result.num_steps)

    def config(self, yaml: str, hparams: Mapping[str, str]) -> None:
        """Write the run's config as text, and the values that runs are compared by as HParams.

        A run that goes on has them already.
        """
        if self._goes_on:
            return
        self.text("config", "\n".join(f"    {line}" for line in yaml.splitlines()))
        self.summary(hparams_config())
        self.summary(hparams_pb(dict(hparams), trial_id=self._trial))

    def plan(
        self,
        plan: ShardingPlan,
        report: PlanReport,
        task: ShardingTask,
        cost: PlanCost,
        *,
        step: int = 0,
        is_new: bool = True,
    ) -> None:
        """Write the plan, its measured and predicted costs, and their explanation.

        Args:
            cost: measured cost.
            step: number of steps trained before the plan was made.
            is_new: false for the plan of a run that goes on with it; its figures are written at
                the end only.
        """
        if not self._enabled:
            return
        # matplotlib takes a second to load, on rank 0 alone
        from dlrm_sharded.explain.figures import plot_cost_by_rank, plot_memory_by_rank

        figures = {
            "embedding/cost_ms": cost.cost_ms,
            "embedding/imbalance": cost.imbalance,
            **_cost_scalars("embedding", cost),
            **{f"embedding/{stage}_ms/mean": cost.stage_mean_ms(stage) for stage in STAGES},
            "plan/solve_s": report.solve_s,
            "plan/lower_bound_ms": report.lower_bound_ms,
            "plan/gap": report.gap,
        }
        if report.cost is not None:
            figures["plan/predicted_ms"] = report.cost.cost_ms
            figures |= _cost_scalars("predicted", report.cost)
        if report.standing is not None:
            figures["plan/expected_error"] = report.standing.error
        known = {tag: value for tag, value in figures.items() if value is not None}
        self._run_scalars |= known
        if not is_new:
            return
        for tag, value in known.items():
            self.scalar(tag, value, step)
        by_rank = plot_cost_by_rank(cost, predicted=report.cost)
        self.figure("plan/cost_by_rank", by_rank, step)
        self.figure("plan/memory_by_rank", plot_memory_by_rank(plan, task), step)
        self.text("plan/explained", explain(plan, report, task, cost), step)


def _cost_scalars(group: str, cost: PlanCost) -> dict[str, float | None]:
    """Return the figures that both measured and predicted costs have, by tag."""
    return {
        f"{group}/critical_path_ms": cost.critical_path_ms,
        f"{group}/input_dist_ms": cost.input_dist_max_ms,
        **{f"{group}/{stage}_ms/max": cost.stage_max_ms(stage) for stage in STAGES},
    }


def hparams_config() -> Summary:
    """Return the columns of the HParams table; TensorBoard takes them from any run."""
    return hparams_config_pb(
        hparams=[HParam(name) for name in HPARAMS],
        metrics=[Metric(tag, display_name=title) for tag, title in COMPARED_METRICS.items()],
    )
