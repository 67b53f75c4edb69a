"""The report on the plan of a TorchRec model: its cost, how sure that is, and where the plan is."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from dlrm_sharded.explain.text import forecast
from dlrm_sharded.files.json_files import write_json
from dlrm_sharded.plans.plan import ShardingPlan
from dlrm_sharded.plans.plan_report import PlanReport, plan_json
from dlrm_sharded.plans.task import ShardingTask


@dataclass(frozen=True, slots=True)
class ModelReport:
    """The planner's statements about the plan of a model; `str` makes a sentence of them.

    Args:
        plan: where all tables lie, under the names that `task` gives them.
        details: predicted cost, its distance from the lower bound, and a diagnosis, among others.
        files: the files that were written.
    """

    task: ShardingTask
    plan: ShardingPlan
    details: PlanReport
    files: tuple[Path, ...] = ()

    @property
    def cost_ms(self) -> float | None:
        """Predicted cost of the plan; None without a cost model."""
        return None if self.details.cost is None else self.details.cost.cost_ms

    @property
    def critical_path_ms(self) -> float | None:
        """Predicted critical path of the plan; None without a cost model."""
        return None if self.details.cost is None else self.details.cost.critical_path_ms

    @property
    def error(self) -> float | None:
        """Expected relative error of the predicted critical path; None if it is not known."""
        return None if self.details.provenance is None else self.details.provenance.error

    @property
    def bound_ms(self) -> float | None:
        """Lower bound of the cost of every plan; None if it is not known."""
        return self.details.lower_bound_ms

    def write(self, folder: Path) -> ModelReport:
        """Write plan.json and task.json, as a run does; return the report with their paths."""
        folder.mkdir(parents=True, exist_ok=True)
        files = folder / "plan.json", folder / "task.json"
        write_json(files[0], plan_json(self.plan, self.details))
        write_json(files[1], self.task.to_json())
        return dataclasses.replace(self, files=files)

    def __str__(self) -> str:
        counts = {"table": len(self.task.tables), "rank": self.task.topology.world_size}
        text = " on ".join(f"{n} {noun}{'s' if n > 1 else ''}" for noun, n in counts.items())
        if replicated := len(self.plan.replicated_tables):
            text += f", {replicated} of them replicated (the dense optimizer has to train them)"
        text = f"{self.details.made_by}: {text}"
        if self.critical_path_ms is None:
            text += "; without cost_model, their cost is not predicted"
        else:
            text += f", {forecast(self.details)}; critical path {self.critical_path_ms:.2f} ms"
        return f"{text}; the plan is {self.files[0]}" if self.files else text
