"""Writes a run in TensorBoard's format; tools outside this repository read the tags.

torch's SummaryWriter takes longer to load than this whole package, and has no public method that
writes HParams to the run's own file. TensorBoard's writer cannot continue a file of an earlier
process, and on a full disk it ends the run.
"""

from __future__ import annotations

import io
import itertools
import logging
import math
import os
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.hparams.summary_v2 import HParam, Metric, hparams_config_pb, hparams_pb
from tensorboard.plugins.text.summary_v2 import text_pb
from tensorboard.summary.writer.record_writer import RecordWriter

from dlrm_sharded.explain.text import explain
from dlrm_sharded.files.errors import LostFolderError
from dlrm_sharded.plans.plan import ShardingPlan
from dlrm_sharded.plans.plan_cost import STAGES, PlanCost
from dlrm_sharded.plans.plan_report import PlanReport
from dlrm_sharded.plans.task import ShardingTask

if TYPE_CHECKING:  # loads torch, or takes a second
    from matplotlib.figure import Figure

    from dlrm_sharded.training.training_result import TrainingResult

log = logging.getLogger(__name__)

FLUSH_S = 10
_number = itertools.count()

THROUGHPUT = "train/samples_per_s/median"
"""Throughput of the whole run, as in result.json; `train/samples_per_s` covers a few steps."""

HPARAMS = ("sharder", "batch_size", "seed")
COMPARED_METRICS = {
    "embedding/cost_ms": "embedding cost, ms",
    THROUGHPUT: "samples/s",
    "eval/auroc": "AUROC",
}
"""Titles of scalars by tag. Together with the HParams, these columns fit on one page."""


class EventFile:
    """An event file in a folder; TensorBoard stops showing earlier files in that folder.

    Events are buffered in memory, and written together every `FLUSH_S` seconds. After a failed
    write, there is one warning, and all further events are lost.

    Args:
        enabled: false, as on ranks other than 0, for no file: then all methods do nothing.
        going_on: name and size of a file of an earlier process, which is truncated to this size and
            continued; None for a new file.
        check_owner: called before each write; raises LostFolderError if another job has the folder.
    """

    def __init__(
        self,
        folder: Path,
        *,
        enabled: bool = True,
        suffix: str = "",
        going_on: tuple[str, int] | None = None,
        check_owner: Callable[[], None] = lambda: None,
    ) -> None:
        self._enabled = enabled  # until a write fails, which may leave half an event
        self._flushed_s = time.monotonic()
        self._check_owner = check_owner
        self._events = io.BytesIO()
        self._records = RecordWriter(self._events)
        number = f"{int(time.time()):010}.{socket.gethostname()}.{os.getpid()}.{next(_number)}"
        name, size = going_on or (f"events.out.tfevents.{number}{suffix}", 0)
        self._path = folder / name
        if not enabled:
            return
        folder.mkdir(parents=True, exist_ok=True)
        with self._path.open("ab") as file:
            goes_on = 0 < size <= os.fstat(file.fileno()).st_size
            file.truncate(size if goes_on else 0)
        if not goes_on:
            self._add(file_version="brain.Event:2")
            # From this step on, TensorBoard drops the values of earlier files.
            self._add(session_log=SessionLog(status=SessionLog.START))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.position()

    def position(self) -> tuple[str, int]:
        """Write all events to disk; return the name of the file and its size in bytes."""
        self._flush()
        return self._path.name, self._path.stat().st_size if self._path.exists() else 0

    def scalar(self, tag: str, value: float, step: int = 0) -> None:
        self._add(step, summary=Summary(value=[Summary.Value(tag=tag, simple_value=value)]))

    def text(self, tag: str, markdown: str, step: int = 0) -> None:
        self._add(step, summary=text_pb(f"{tag}/text_summary", markdown))

    def figure(self, tag: str, figure: Figure, step: int = 0) -> None:
        png = io.BytesIO()
        figure.savefig(png, format="png")
        width, height = map(int, figure.bbox.size)
        image = Summary.Image(
            width=width, height=height, colorspace=3, encoded_image_string=png.getvalue()
        )
        self._add(step, summary=Summary(value=[Summary.Value(tag=tag, image=image)]))

    def _add(self, step: int = 0, **content: object) -> None:
        event = Event(wall_time=time.time(), step=step, **content)
        self._records.write(event.SerializeToString())
        if time.monotonic() - self._flushed_s > FLUSH_S:
            self._flush()

    def _flush(self) -> None:
        events = self._events.getvalue()
        self._events.seek(0)
        self._events.truncate()
        self._flushed_s = time.monotonic()
        if not self._enabled:
            return
        try:
            self._check_owner()
            with self._path.open("ab") as file:  # append: another job's events stay
                file.write(events)
        except (OSError, LostFolderError) as error:
            self._enabled = False
            log.warning(
                "TensorBoard's events of this run are lost from here on: %s: %s",
                self._path,
                getattr(error, "strerror", error),
            )


class RunWriter(EventFile):
    """The event file of a run; its arguments are those of `EventFile`."""

    def __init__(self, run_dir: Path, **options: Any) -> None:
        super().__init__(run_dir, **options)
        self._goes_on = options.get("going_on") is not None
        self._run_scalars: dict[str, float] = {}

    def run_scalar(self, tag: str, value: float) -> None:
        """Write a figure of the whole run."""
        self._run_scalars[tag] = value
        self.scalar(tag, value)

    def conclude(self, result: TrainingResult) -> None:
        """Write the figures of the whole training run, then all run figures again at the last step.

        TensorBoard hides the highest and lowest single points as outliers, but not those of lines.
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
        """Write the run's config as text, and the values by which runs are compared as HParams.

        A resumed run has them already.
        """
        if self._goes_on:
            return
        self.text("config", "\n".join(f"    {line}" for line in yaml.splitlines()))
        columns = hparams_config_pb(
            hparams=[HParam(name) for name in HPARAMS],
            metrics=[Metric(tag, display_name=title) for tag, title in COMPARED_METRICS.items()],
        )
        self._add(summary=columns)
        # TensorBoard cuts the end of a name, and treats equal names as one trial.
        trial = f"{self._path.parent.name}/{self._path.parent.parent.name}"
        self._add(summary=hparams_pb(dict(hparams), trial_id=trial))

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
            is_new: false if a resumed run keeps the plan; its figures are then written only at the
                end.
        """
        if not self._enabled:
            return
        # matplotlib takes a second to load, and only rank 0 needs it
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
        if report.provenance is not None:
            figures["plan/expected_error"] = report.provenance.error
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
