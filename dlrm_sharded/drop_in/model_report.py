"""The report on the plan of a TorchRec model: its cost, how sure that is, and where the plan is."""

from __future__ import annotations

import dataclasses
from collections.abc import Set
from dataclasses import dataclass
from pathlib import Path

from dlrm_sharded.cost.base import PricedTask
from dlrm_sharded.files.json_files import write_json
from dlrm_sharded.plans.layouts import Replicas
from dlrm_sharded.plans.plan import ShardingPlan
from dlrm_sharded.plans.plan_report import PlanReport, plan_json
from dlrm_sharded.plans.task import ShardingTask
from dlrm_sharded.search.build_problem import worth_replicating


@dataclass(frozen=True, slots=True)
class ReplicaGain:
    """The gain of replicas that a plan does not have.

    Args:
        tables: names of the tables that replicas would make cheaper.
        saved_ms: reduction of the predicted critical path.
        share: the same, relative to the critical path.
    """

    tables: tuple[str, ...]
    saved_ms: float
    share: float


@dataclass(frozen=True, slots=True)
class ModelReport:
    """The planner's statements about the plan of a model; `str` makes a sentence of them.

    Args:
        plan: where all tables lie, under the names that `task` gives them.
        details: predicted cost, its distance from the lower bound, and a diagnosis; see there.
        replica_gain: None without a cost model, or if replicas gain nothing.
        deduplicating: modules whose ids TorchRec deduplicates, which the plan does not consider.
        plan_s: time that planning took, with the measurement of data.
        files: the files that were written.
    """

    task: ShardingTask
    plan: ShardingPlan
    details: PlanReport
    replica_gain: ReplicaGain | None = None
    deduplicating: tuple[str, ...] = ()
    plan_s: float = 0.0
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
        return None if self.details.standing is None else self.details.standing.error

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
        return text + self._costs() + self._gain() + self._dedup() + self._places()

    def _costs(self) -> str:
        details = self.details
        if details.cost is None:
            return (
                "; without cost_model, their critical path is not predicted, nor what replicas "
                "would gain"
            )
        text = (
            f", predicted critical path {details.cost.critical_path_ms:.2f} ms, cost "
            f"{details.cost.cost_ms:.2f} ms"
        )
        if details.standing is not None:
            text += f" ({details.standing.short_text})"
        if details.caveat is not None:
            return f"{text} (see the caveat)"
        if details.gap is None:
            return text
        gap, bound_ms = 100 * details.gap, details.lower_bound_ms
        return f"{text}, at most {gap:z.1f} % above the best possible, {bound_ms:.2f} ms"

    def _gain(self) -> str:
        gain = self.replica_gain
        if gain is None:
            return ""
        return (
            f"; replicas of {len(gain.tables)} tables would save {gain.saved_ms:.2f} ms "
            f"({gain.share:.1%}): for them, constrain report.replica_gain.tables to data_parallel, "
            "and let the dense optimizer train them"
        )

    def _dedup(self) -> str:
        names = ", ".join(repr(path) if path else "the model" for path in self.deduplicating)
        return f"; planned as if {names} had no use_index_dedup" if names else ""

    def _places(self) -> str:
        return f"; the plan is {self.files[0]}" if self.files else ""


def replica_gain(
    plan: ShardingPlan, replicable: Set[str], priced: PricedTask
) -> ReplicaGain | None:
    """Return what a plan would gain by replicas of the tables for which they pay; None if nothing.

    Replicas that no longer fit beside those of smaller tables are left out.

    Args:
        replicable: names of the tables that may be replicas.
    """
    found = _with_replicas(plan, replicable, priced)
    if found is None:
        return None
    now_ms, then_ms = (priced.predict(each).critical_path_ms for each in (plan, found))
    if then_ms >= now_ms:
        return None
    more = tuple(name for name in found.replicated_tables if name not in plan.replicated_tables)
    return ReplicaGain(more, now_ms - then_ms, 1 - then_ms / now_ms)


def _with_replicas(
    plan: ShardingPlan, replicable: Set[str], priced: PricedTask
) -> ShardingPlan | None:
    """Return the plan with replicas in the place of tables for which they pay; None if none do."""
    task = priced.task
    layouts = {t.name: t.layouts | {"replicas"} for t in task.tables if t.name in replicable}
    world_size, capacity = task.topology.world_size, task.topology.rank_memory_bytes
    worth = worth_replicating(priced.with_task(task.with_values(layouts=layouts)))
    found: ShardingPlan | None = None
    for table in sorted(task.tables, key=task.topology.table_bytes):
        if table.name not in worth:
            continue
        others = [shard for shard in (found or plan).shards if shard.table != table.name]
        tried = dataclasses.replace(plan, shards=(*others, *Replicas(world_size).shards(table)))
        used = tried.bytes_by_rank(task.topology)
        if all(own <= have for own, have in zip(used, capacity, strict=True)):
            found = tried
    return found
