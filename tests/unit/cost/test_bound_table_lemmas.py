"""The lemmas on pieces, layouts and modules of tables: L13 to L15 of docs/notes/lower_bound.md."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrm_sharded.cost.bound import Relaxation, lower_bound_ms
from dlrm_sharded.cost.learned import LearnedCostModel
from dlrm_sharded.plans.layouts import RowBlocks
from dlrm_sharded.plans.plan import Shard
from dlrm_sharded.plans.tables import Table
from tests.unit.cost.bound_lemmas import TOLERANCE, at_least, kind_of, models
from tests.unit.cost.plans import Planned, planned
from tests.unit.cost.worked_bound import LAUNCH_MS, worked_model
from tests.unit.search.synthetic import predicted
from tests.unit.synthetic import USED_ONCE, task_of


def test_l13_a_rank_waits_for_its_largest_piece() -> None:
    """A table of 4 columns and one row is on one rank, and all its bytes are that rank's."""
    task = task_of((Table("a", 1, 4, 10.0, USED_ONCE),), 2, 2**30, 1000)
    shards = (Shard.whole(task.tables[0], 0),)
    cost_ms = predicted(shards, task, worked_model()).cost_ms
    assert cost_ms == pytest.approx(1.5 + LAUNCH_MS + 0.1 + 10.0 * 0.008)
    bound_ms = lower_bound_ms(worked_model().cost_task(task), replicas=False)
    assert bound_ms == pytest.approx(cost_ms, rel=1e-5)


@given(
    of=planned(layouts=("rows", "rows", "rows_of_host", "whole")),
    model=models,
    counts=st.lists(st.floats(0.3, 3.0), min_size=4, max_size=4),
)
def test_l14_row_blocks_of_sequences_reduce_nothing(
    of: Planned, model: LearnedCostModel, counts: list[float]
) -> None:
    """Also where the last block has fewer rows, and so the last rank less to send."""
    communication = dataclasses.replace(model.communication, sequences=np.reshape(counts, (2, 2)))
    model = dataclasses.replace(model, communication=communication)
    relaxation = Relaxation(model.cost_task(of[1]))
    kind = kind_of(of, relaxation)
    cost_ms = predicted(of[0].shards, of[1], model).cost_ms * (1 + TOLERANCE)
    assert at_least(cost_ms, relaxation.mean_ms(cost_ms, kind))
    assert not relaxation.exceeds(cost_ms, kind)


@pytest.mark.parametrize("pooled", [True, False])
@pytest.mark.parametrize("modules", ["aaa", "abb", "abc"])
def test_l15_modules_pay_for_their_own_launches(modules: str, pooled: bool) -> None:
    """Tables that fit in row blocks only have one plan, and its cost is the bound (L16, too)."""
    tables = [
        Table(f"t{i}", 4000, 4, 10.0, USED_ONCE, pooled=pooled, module=module)
        for i, module in enumerate(modules)
    ]
    task = task_of(tables, 4, 3 * 1000 * 16, 512)
    shards = tuple(shard for table in tables for shard in RowBlocks(range(4)).shards(table))
    model = worked_model()
    forward = dataclasses.replace(model.compute.forward, next_launch_ms=0.5)
    model = dataclasses.replace(model, compute=dataclasses.replace(model.compute, forward=forward))
    cost_ms = predicted(shards, task, model).cost_ms
    assert lower_bound_ms(model.cost_task(task)) == pytest.approx(cost_ms, rel=1e-5)
