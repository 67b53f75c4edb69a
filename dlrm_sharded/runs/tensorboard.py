"""TensorBoard: the tags that tools outside this repository read, written by rank 0 alone."""

from __future__ import annotations

import math
import types
from collections.abc import Mapping
from pathlib import Path

from tensorboard.plugins.hparams.summary_v2 import hparams_pb
from torch.utils.tensorboard import SummaryWriter

from dlrm_sharded.explain.figures import plot_cost_by_rank, plot_memory_by_rank
from dlrm_sharded.explain.text import explain
from dlrm_sharded.plan import ShardingPlan
from dlrm_sharded.plan_cost import STAGES, PlanCost
from dlrm_sharded.plan_report import PlanReport
from dlrm_sharded.runs.tags import THROUGHPUT, hparams_config
from dlrm_sharded.task import ShardingTask
from dlrm_sharded.training.trainer import TrainingResult


class RunWriter:
    """One run's event file. On ranks above 0 there is none, and every method does nothing."""

    def __init__(self, run_dir: Path, *, enabled: bool) -> None:
        # A restarted run writes over what its first start left behind.
        self._writer = SummaryWriter(str(run_dir), flush_secs=10, purge_step=0) if enabled else None
        # TensorBoard cuts the end of a name, and takes equal ones for one trial.
        self._trial = f"{run_dir.name}/{run_dir.parent.name}"
        self._of_run: dict[str, float] = {}

    def __enter__(self) -> RunWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: types.TracebackType | None,
    ) -> None:
        if self._writer is not None:
            self._writer.close()

    def scalar(self, tag: str, value: float, step: int = 0) -> None:
        if self._writer is not None:
            self._writer.add_scalar(tag, value, step)

    def scalar_of_run(self, tag: str, value: float) -> None:
        """A figure of the run as a whole."""
        self._of_run[tag] = value
        self.scalar(tag, value)

    def conclude(self, result: TrainingResult) -> None:
        """What is known when training ends; then all figures of the run once more, at its end.

        A chart of single points hides the highest and the lowest as outliers; lines it shows.
        """
        self.scalar_of_run("memory/peak_gib/max", result.peak_gib)
        if math.isfinite(result.samples_per_s):
            self.scalar_of_run(THROUGHPUT, result.samples_per_s)
        for tag, value in self._of_run.items():
            self.scalar(tag, value, result.num_steps)

    def config(self, yaml: str, hparams: Mapping[str, str]) -> None:
        """The run's config as text, and what runs are compared by as HParams in the same file.

        `add_hparams` of torch would open a run of its own, apart from the scalars.
        """
        if self._writer is None:
            return
        indented = "\n".join(f"    {line}" for line in yaml.splitlines())
        self._writer.add_text("config", indented)
        file_writer = self._writer._get_file_writer()
        file_writer.add_summary(hparams_config())
        file_writer.add_summary(hparams_pb(dict(hparams), trial_id=self._trial))

    def plan(
        self, plan: ShardingPlan, report: PlanReport, task: ShardingTask, cost: PlanCost
    ) -> None:
        """Write the plan, what it costs, and why; beside it what was predicted.

        Args:
            cost: measured.
        """
        if self._writer is None:
            return
        figures = {
            "embedding/cost_ms": cost.cost_ms,
            "embedding/imbalance": cost.imbalance,
            **_stage_figures("embedding", cost),
            **{f"embedding/{stage}_ms/mean": cost.stage_mean_ms(stage) for stage in STAGES},
            "plan/solve_s": report.solve_s,
            "plan/lower_bound_ms": report.lower_bound_ms,
            "plan/gap": report.gap,
        }
        if report.cost is not None:
            figures["plan/predicted_ms"] = report.cost.cost_ms
            figures |= _stage_figures("predicted", report.cost)
        for tag, value in figures.items():
            if value is not None:
                self.scalar_of_run(tag, value)
        self._writer.add_figure("plan/cost_by_rank", plot_cost_by_rank(cost, predicted=report.cost))
        self._writer.add_figure("plan/memory_by_rank", plot_memory_by_rank(plan, task))
        self._writer.add_text("plan/explained", explain(plan, report, task, cost))


def _stage_figures(group: str, cost: PlanCost) -> dict[str, float | None]:
    """Return the figures that measured and predicted costs have in common, by tag."""
    return {
        f"{group}/critical_path_ms": cost.critical_path_ms,
        f"{group}/input_dist_ms": cost.input_dist_max_ms,
        **{f"{group}/{stage}_ms/max": cost.stage_max_ms(stage) for stage in STAGES},
    }
