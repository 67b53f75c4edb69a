"""What a search sees of a placement is what the model predicts for the plan that it stands for."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlrm_sharded.cost.candidates import TOTALS, Placement
from dlrm_sharded.cost.features import workload_of_plan
from dlrm_sharded.cost.learned import LearnedCostModel
from dlrm_sharded.plan import Shard, ShardingPlan
from dlrm_sharded.tables import Table
from dlrm_sharded.task import ShardingTask, Topology
from tests.unit.cost.hardware import reuse_histogram
from tests.unit.cost.plans import Planned, planned

LAYOUTS = ("whole", "columns")
some = settings(max_examples=40, deadline=None)
objectives = st.sampled_from(TOTALS)


def placement(model: LearnedCostModel, of: Planned, objective: str) -> Placement:
    plan, task = of
    workload = workload_of_plan(plan, task)
    return Placement(
        model,
        model.hosts(task.topology),
        batch_size=task.batch_size,
        vectors=model.compute.vectors(workload),
        num_cols=workload.num_cols,
        rank=workload.rank,
        objective=objective,
    )


def predicted_ms(model: LearnedCostModel, of: Planned, objective: str) -> float:
    cost = model.predict(*of)
    return cost.critical_path_ms if objective == "critical_path" else cost.cost_ms


def on_ranks(of: Planned, ranks: list[int]) -> Planned:
    """The same shards on other ranks."""
    plan, task = of
    shards = [
        dataclasses.replace(shard, rank=rank)
        for shard, rank in zip(plan.shards, ranks, strict=True)
    ]
    return dataclasses.replace(plan, shards=tuple(shards)), task


def ranks_of(of: Planned) -> list[int]:
    return [shard.rank for shard in of[0].shards]


@given(of=planned(layouts=LAYOUTS), objective=objectives)
@some
def test_the_objective_is_what_the_model_predicts(
    model: LearnedCostModel, of: Planned, objective: str
) -> None:
    found = placement(model, of, objective).objective_ms
    assert found == pytest.approx(predicted_ms(model, of, objective), rel=1e-9)


@given(of=planned(layouts=LAYOUTS), objective=objectives)
@some
def test_every_move_costs_what_it_will(
    model: LearnedCostModel, of: Planned, objective: str
) -> None:
    """All shards to all ranks, at once; the placement itself stays."""
    here = placement(model, of, objective)
    before, ranks = here.objective_ms, ranks_of(of)
    shard, to = np.indices((len(ranks), of[0].world_size)).reshape(2, -1)
    found = here.after_moves(shard, to)
    for i, target, objective_ms in zip(shard, to, found, strict=True):
        moved = on_ranks(of, [*ranks[:i], int(target), *ranks[i + 1 :]])
        assert objective_ms == pytest.approx(predicted_ms(model, moved, objective), rel=1e-9)
    assert here.objective_ms == before
    assert here.rank.tolist() == ranks


@given(of=planned(layouts=LAYOUTS), objective=objectives)
@some
def test_every_swap_costs_what_it_will(
    model: LearnedCostModel, of: Planned, objective: str
) -> None:
    here = placement(model, of, objective)
    before, ranks = here.objective_ms, ranks_of(of)
    one, other = np.indices((len(ranks), len(ranks))).reshape(2, -1)
    found = here.after_swaps(one, other)
    for i, j, objective_ms in zip(one, other, found, strict=True):
        swapped = list(ranks)
        swapped[i], swapped[j] = ranks[j], ranks[i]
        after = on_ranks(of, swapped)
        assert objective_ms == pytest.approx(predicted_ms(model, after, objective), rel=1e-9)
    assert here.objective_ms == before


def random_plan(seed: int, *, num_tables: int) -> Planned:
    """Tables of very different sizes on 2 hosts of 4 ranks."""
    rng = np.random.default_rng(seed)
    tables = []
    for i in range(num_tables):
        num_rows = round(10 ** rng.uniform(2, 7))
        width, pooling = 4 * int(rng.integers(1, 65)), 10 ** rng.uniform(-1, 2)
        histogram = reuse_histogram(num_rows, rng.uniform(0, 1.2), 4096 * pooling)
        tables.append(Table(f"t{i}", num_rows, width, pooling, histogram))
    shards = [Shard.whole(table, int(rng.integers(8))) for table in tables]
    task = ShardingTask(tuple(tables), Topology(8, 10**15, 4), 4096)
    return ShardingPlan("random", 8, tuple(shards)), task


@pytest.mark.parametrize("objective", TOTALS)
@pytest.mark.parametrize("num_tables", [3, 60])
def test_a_long_walk_stays_exact(model: LearnedCostModel, num_tables: int, objective: str) -> None:
    """Sums that many moves changed are those of a placement made anew.

    With 3 tables most ranks are emptied again and again.
    """
    of = random_plan(0, num_tables=num_tables)
    walker = placement(model, of, objective)
    rng = np.random.default_rng(1)
    for step in range(1, 1501):
        shard, to = int(rng.integers(num_tables)), int(rng.integers(8))
        expected = walker.after_moves(np.array([shard]), np.array([to]))[0]
        walker.move(shard, to)
        assert walker.rank[shard] == to
        assert walker.objective_ms == pytest.approx(expected, rel=1e-9)
        if step % 250 == 0:
            anew = on_ranks(of, walker.rank.tolist())
            assert walker.objective_ms == pytest.approx(
                predicted_ms(model, anew, objective), rel=1e-9
            )
            np.testing.assert_allclose(
                walker._sums, placement(model, anew, objective)._sums, rtol=1e-9, atol=1e-12
            )
