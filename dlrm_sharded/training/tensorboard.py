"""TensorBoard: the tags that tools outside this repository read, written by rank 0 alone."""

from __future__ import annotations

import types
from collections.abc import Mapping
from pathlib import Path

from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.hparams.summary_v2 import HParam, Metric, hparams_config_pb, hparams_pb
from torch.utils.tensorboard import SummaryWriter

from dlrm_sharded.cost.measure import MeasuredCost
from dlrm_sharded.cost.types import STAGES
from dlrm_sharded.plan import ShardingPlan
from dlrm_sharded.task import ShardingTask
from dlrm_sharded.training.explain import explain, plot_cost_by_rank, plot_memory_by_rank

COMPARED_METRICS = (
    "embedding/cost_ms",
    "embedding/critical_path_ms",
    "embedding/imbalance",
    "train/samples_per_s",
    "eval/auroc",
)
"""Few enough for one page of TensorBoard's HParams table."""

HPARAMS = ("sharder", "world_size", "batch_size", "seed")
"""What runs are compared by."""


def hparams_config() -> Summary:
    """Columns of the HParams table: the same from every run, as TensorBoard takes any one's."""
    return hparams_config_pb(
        hparams=[HParam(name) for name in HPARAMS],
        metrics=[Metric(tag) for tag in COMPARED_METRICS],
    )


class RunWriter:
    """One run's event file. On ranks above 0 there is none, and every method does nothing."""

    def __init__(self, run_dir: Path, *, enabled: bool) -> None:
        # A restarted run writes over what its first start left behind.
        self._writer = SummaryWriter(str(run_dir), flush_secs=10, purge_step=0) if enabled else None
        self._trial = f"{run_dir.parent.name}/{run_dir.name}"

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

    def plan(self, plan: ShardingPlan, task: ShardingTask, measured: MeasuredCost) -> None:
        """The plan, what it costs, and why."""
        if self._writer is None:
            return
        cost = measured.cost
        self.scalar("embedding/cost_ms", cost.cost_ms)
        self.scalar("embedding/critical_path_ms", cost.critical_path_ms)
        self.scalar("embedding/input_dist_ms", max(measured.input_dist_ms))
        self.scalar("embedding/imbalance", cost.imbalance)
        for stage in STAGES:
            self.scalar(f"embedding/{stage}_ms/max", cost.stage_max_ms(stage))
            self.scalar(f"embedding/{stage}_ms/mean", cost.stage_mean_ms(stage))
        if plan.solve_s is not None:
            self.scalar("plan/solve_s", plan.solve_s)
        if plan.predicted is not None:
            self.scalar("plan/predicted_ms", plan.predicted.cost_ms)
        self._writer.add_figure("plan/cost_by_rank", plot_cost_by_rank(cost))
        self._writer.add_figure("plan/memory_by_rank", plot_memory_by_rank(plan, task))
        self._writer.add_text("plan/explained", explain(plan, task, cost))
