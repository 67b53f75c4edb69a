"""Why a plan costs what it does: held against the cost model's predictions of changed plans."""

import dataclasses
import pickle
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlrm_sharded import PlanCost, PlanReport, StageCost, Table, validate
from dlrm_sharded.cost.bound import lower_bound_ms
from dlrm_sharded.cost.learned import LearnedCostModel
from dlrm_sharded.explain import diagnosis as module
from dlrm_sharded.explain.diagnosis import BOUNDING_FRACTION, MAX_RANKS, MAX_SPLITS, diagnose
from dlrm_sharded.explain.text import forecast, sections
from dlrm_sharded.plans.plan import Shard, ShardingPlan
from dlrm_sharded.plans.plan_report import Alternative, Diagnosis
from dlrm_sharded.plans.task import ShardingTask
from tests.unit.cost.plans import Planned, planned
from tests.unit.search.synthetic import MODELS, model_of
from tests.unit.synthetic import column_shards, tables_of, task_of, with_memory


@pytest.fixture(autouse=True, scope="module")
def ample_time() -> Iterator[None]:
    """However slow the machine, what is found is the same."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("SEARCH_S", "SPLITS_S", "DIAGNOSIS_S"):
            patch.setattr(module, name, 1e6)
        yield


@st.composite
def limited(draw: st.DrawFn) -> Planned:
    """A plan on ranks with little or much more memory than it takes, the same on each or not."""
    plan, task = draw(planned())
    used = plan.bytes_by_rank(task.topology)
    ratios = st.sampled_from([1.0, 1.3, 3.0, 1000.0])
    memory = [int(max(used) * draw(ratios)) + 1] * len(used)
    if draw(st.booleans()):
        memory = [int(size * draw(ratios)) + 1 for size in used]
    return plan, with_memory(task, *memory)


def cost_of(plan: ShardingPlan, task: ShardingTask, model: LearnedCostModel) -> PlanCost:
    return model.cost_task(task).predict(plan)


def gain_ms(
    plan: ShardingPlan, task: ShardingTask, model: LearnedCostModel, table: Table
) -> float | None:
    """What the split of a table bought, all ranks tried."""
    others = tuple(shard for shard in plan.shards if shard.table != table.name)
    costs = []
    for rank, capacity in enumerate(task.topology.rank_memory_bytes):
        changed = dataclasses.replace(plan, shards=(*others, Shard.whole(table, rank)))
        if changed.bytes_by_rank(task.topology)[rank] <= capacity:
            validate(changed, task)
            costs.append(cost_of(changed, task, model).cost_ms)
    return min(costs) - cost_of(plan, task, model).cost_ms if costs else None


@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=15)
@given(data=st.data())
def test_any_plan(name: str, data: st.DataObject) -> None:
    """What is said of ranks, shards and splits is what the model predicts."""
    model = model_of(name)
    plan, task = data.draw(limited())
    found = diagnose(plan, model.cost_task(task), alternatives=False)
    cost = cost_of(plan, task, model)
    assert found.cost_ms == cost.cost_ms
    assert found.alternatives is None
    assert pickle.loads(pickle.dumps(found)) == found
    check_ranks(found, plan, cost)
    check_splits(found, plan, task, model)


@settings(max_examples=6)
@given(of=limited())
def test_alternatives_of_any_plan_cost_less(of: Planned) -> None:
    found = diagnose(of[0], MODEL.cost_task(of[1]), alternatives=True)
    assert pickle.loads(pickle.dumps(found)) == found
    for other in found.alternatives or ():
        assert other.cost_ms is None or other.cost_ms < found.cost_ms


def check_ranks(found: Diagnosis, plan: ShardingPlan, cost: PlanCost) -> None:
    totals = [rank.total_ms for rank in cost.per_rank]
    near = [rank for rank, ms in enumerate(totals) if ms >= BOUNDING_FRACTION * max(totals)]
    assert found.num_bounding == len(near)
    assert len(found.bounding) == min(len(near), MAX_RANKS)
    assert found.bounding[0].cost_ms == max(totals)
    for rank in found.bounding:
        assert rank.rank in near
        assert rank.cost_ms == totals[rank.rank]
        on_rank = [shard for shard in plan.shards if shard.rank == rank.rank]
        assert sorted(shard.shard for shard in rank.shards) == sorted(on_rank)
        costs = [shard.cost_ms for shard in rank.shards]
        assert costs == sorted(costs, reverse=True)
        assert all(shard.compute_ms >= 0 and shard.comm_ms >= 0 for shard in rank.shards)
        stages = cost.per_rank[rank.rank]
        compute_ms = sum(shard.compute_ms for shard in rank.shards)
        assert compute_ms <= (stages.fwd_compute_ms + stages.bwd_compute_ms) * (1 + 1e-9)
        comm_ms = sum(shard.comm_ms for shard in rank.shards)
        assert comm_ms <= (stages.fwd_comm_ms + stages.bwd_comm_ms) * (1 + 1e-9)


def check_splits(
    found: Diagnosis, plan: ShardingPlan, task: ShardingTask, model: LearnedCostModel
) -> None:
    tables = {table.name: table for table in task.tables}
    split = {name for name, shards in plan.shards_by_table().items() if len(shards) > 1}
    assert {gain.table for gain in found.splits} == split
    assert found.num_split == len(split)
    for gain in found.splits:
        expected = gain_ms(plan, task, model, tables[gain.table])
        if expected is None:
            assert gain.gain_ms is None
        elif plan.world_size <= module.MAX_CANDIDATES:
            assert gain.gain_ms == pytest.approx(expected, rel=1e-6, abs=1e-9 * found.cost_ms)
        else:
            assert -1e-6 <= (gain.gain_ms - expected) / (found.cost_ms + expected) <= 0.1
    gains = [gain.gain_ms for gain in found.splits if gain.gain_ms is not None]
    assert gains == sorted(gains, reverse=True)
    assert all(gain.gain_ms is None for gain in found.splits[len(gains) :])


BUSY = Table("busy", 5000, 32, 30.0)
IDLE = Table("idle", 1, 4, 0.5)
MODEL = model_of("shipped")


def diagnosed(plan: ShardingPlan, task: ShardingTask) -> Diagnosis:
    """As every run does it, without a search."""
    return diagnose(plan, MODEL.cost_task(task), alternatives=False)


def halves(table: Table) -> list[Shard]:
    return column_shards(table, *((rank, table.embedding_dim // 2) for rank in (0, 1)))


def test_the_costliest_of_many_splits() -> None:
    """Those with the most work, whatever their order in the task."""
    tables = tables_of(*((1000, 8, 1.0 + i % 7 + i / 100) for i in range(MAX_SPLITS + 6)))
    plan = ShardingPlan(2, tuple(shard for table in tables for shard in halves(table)))
    found = diagnosed(plan, task_of(tables, batch_size=512))
    assert found.num_split == MAX_SPLITS + 6
    idlest = sorted(tables, key=lambda table: table.pooling_factor)[:6]
    left = {table.name for table in tables} - {split.table for split in found.splits}
    assert left == {table.name for table in idlest}
    assert "split tables not looked at: 6" in sections(found)["Gains of splits"]


def changes_of(found: Diagnosis) -> dict[str, float | None]:
    return {other.change: other.cost_ms for other in found.alternatives}


@pytest.mark.parametrize(
    ("world_size", "per_host", "more"),
    [(2, None, "one more rank"), (1, 1, "one more rank"), (4, 2, "one more host")],
)
@pytest.mark.parametrize("by_rank", [False, True], ids=["alike", "by_rank"])
def test_alternatives_to_a_bad_plan(
    world_size: int, per_host: int | None, more: str, by_rank: bool
) -> None:
    tables = tables_of(*((5000, 32, 10.0 + i) for i in range(8)))
    ranks = {"local_world_size": per_host, "inter_host_bytes_per_s": 1e10}
    if by_rank:
        ranks["memory_bytes_by_rank"] = (10**8,) * world_size
    task = task_of(tables, world_size, 10**8, 4096, **ranks)
    plan = ShardingPlan.from_ranks(task, [0] * 8)
    found = diagnose(plan, MODEL.cost_task(task), alternatives=True)
    costs = changes_of(found)
    assert list(costs) == ["another plan", more, "10 % more memory"]
    if world_size == 1:
        assert costs["another plan"] is None
        return
    assert costs["another plan"] is not None
    assert lower_bound_ms(MODEL.cost_task(task)) <= costs["another plan"] < found.cost_ms
    assert costs[more] < costs["another plan"]


def test_a_rank_costs_what_its_shards_do_and_launches() -> None:
    """One rank exchanges nothing."""
    task = task_of((IDLE, BUSY), 1)
    plan = ShardingPlan.from_ranks(task, (0, 0))
    (rank,) = diagnosed(plan, task).bounding
    launch_ms = float(MODEL.compute.launch_ms(np.ones(1)).sum())
    assert [shard.shard.table for shard in rank.shards] == ["busy", "idle"]
    assert rank.overhead_ms == pytest.approx(launch_ms)
    assert sum(shard.cost_ms for shard in rank.shards) == pytest.approx(rank.cost_ms - launch_ms)


def test_without_time_nothing_is_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    """And no split is costed; what it costs to explain a plan has an end."""
    monkeypatch.setattr(module, "DIAGNOSIS_S", 0.0)
    monkeypatch.setattr(module, "SPLITS_S", 0.0)
    task = task_of([BUSY])
    found = diagnose(ShardingPlan(2, tuple(halves(BUSY))), MODEL.cost_task(task), alternatives=True)
    assert set(changes_of(found).values()) == {None}
    assert (found.splits, found.num_split) == ((), 1)
    assert sections(found)["Gains of splits"] == ["split tables not looked at: 1"]
    assert len(found.bounding) == found.num_bounding > 0
    others = [Alternative("another plan", 5.0), Alternative("10 % more memory", 4.999)]
    found = dataclasses.replace(found, cost_ms=10.0, alternatives=tuple(others))
    assert sections(found)["Gains of alternatives"][2] == (
        "10 % more memory: 5.00 ms, 50.0 % less; no gain over another plan without it"
    )


@pytest.mark.parametrize(
    ("bound_ms", "caveat", "text"),
    [
        (None, None, "predicted 36.20 ms"),
        (0.0, None, "predicted 36.20 ms"),
        (36.2 / 1.0131, None, "predicted 36.20 ms, at most 1.3 % above the lower bound"),
        (36.2 * (1 + 1e-12), None, "predicted 36.20 ms, at most 0.0 % above the lower bound"),
        (30.0, "other device", "predicted 36.20 ms (see the caveat)"),
    ],
)
def test_forecast(bound_ms: float | None, caveat: str | None, text: str) -> None:
    """With a caveat, it names no optimum."""
    cost = PlanCost((StageCost(10.0, 10.2, 8.0, 8.0),))
    report = PlanReport("test", 0.1, cost=cost, caveat=caveat, lower_bound_ms=bound_ms)
    assert forecast(report) == text
    assert forecast(PlanReport("test", 0.1)) is None
