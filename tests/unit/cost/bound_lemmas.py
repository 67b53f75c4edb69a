"""Cost models for the lemmas of docs/notes/lower_bound.md, and the kind that a plan is of.

Both sides of an inequality are sums of the same numbers in different orders, so they are compared
with a relative tolerance of 1e-9.

Letters: T tables, S shards.
"""

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from dlrm_sharded.cost.bound import Relaxation
from dlrm_sharded.cost.plan_kinds import SEQUENCE_ROWS, PlanKind
from dlrm_sharded.cost.workload import Workload, workload_of_plan
from tests.unit.cost.plans import Planned
from tests.unit.search.synthetic import MODELS, model_of

Floats = NDArray[np.float64]

TOLERANCE = 1e-9

models = st.builds(model_of, st.sampled_from(MODELS), st.integers(0, 3))


def at_least(larger: Floats | float, smaller: Floats | float) -> bool:
    """Return whether no element of `larger` is smaller, up to rounding."""
    scale = np.maximum(np.abs(larger), np.abs(smaller))
    return bool((np.asarray(larger) >= smaller - TOLERANCE * scale).all())


def layouts_of(workload: Workload) -> NDArray[np.str_]:
    """[S], the layout that each shard is part of."""
    is_column, is_row = (
        ~workload.is_replica & (workload.group_size == size) for size in (1, workload.world_size)
    )
    is_sequence = is_row & (workload.reduce_size != workload.group_size)
    conditions = [workload.is_replica, is_column, is_sequence, is_row]
    return np.select(conditions, ["replicas", "columns", SEQUENCE_ROWS, "rows"], "host_rows")


def every_rank_ms_of(kind: PlanKind, of: Planned) -> Floats:
    """[T], what every rank pays for the tables of a plan; inf for layouts that the kind has not."""
    plan, task = of
    layouts = dict.fromkeys([table.name for table in task.tables], "columns")
    if task.topology.world_size > 1:
        names = layouts_of(workload_of_plan(plan, task)).tolist()
        layouts |= dict(zip([shard.table for shard in plan.shards], names, strict=True))
    rows = [cuts.layout for cuts in kind.cuts]
    if set(rows) != set(layouts.values()):
        return np.full(len(task.tables), np.inf)
    places = [rows.index(layouts[table.name]) for table in task.tables]
    return kind.every_rank_ms[places, np.arange(len(places))]


def kind_of(of: Planned, relaxation: Relaxation) -> PlanKind:
    """The kind of L8 and L12 that a plan is of; there is no other."""
    kinds = relaxation.kinds()
    (kind,) = (k for k in kinds if np.isfinite(every_rank_ms_of(k, of)).all())
    return kind
