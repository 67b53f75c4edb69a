"""Deduplicated ids of sequences: how many are left, and what the plan costs with them."""

import dataclasses
import math

import numpy as np
import pytest

from dlrm_sharded import InvalidPlanError, Planner, RunContext, make_sharder
from dlrm_sharded.accesses.profiles import with_expected_profile
from dlrm_sharded.cost.dedup import deduplicated, gpu_dedup_prices, sequence_modules
from dlrm_sharded.cost.learned import LearnedCostModel, prior_cost_model
from dlrm_sharded.cost.workload import workload_of_plan
from dlrm_sharded.explain.diagnosis import diagnose
from dlrm_sharded.hardware.gpus.gpu_specs import gpu_specs
from dlrm_sharded.hardware.hardware import Hardware
from dlrm_sharded.plans.plan import Shard, ShardingPlan
from dlrm_sharded.plans.tables import Table
from dlrm_sharded.plans.task import GIB, ShardingTask, Topology
from dlrm_sharded.plans.validation import validate

RANKS, BATCH_SIZE, IDS = 4, 4096, 16.0
SPEC = gpu_specs()["h100_sxm"]


def task_of(
    exponent: float | None, *, num_rows: int = 100_000, device: str = "cuda"
) -> ShardingTask:
    """Return a task of a pooled table and two tables of sequences, of one module."""
    tables = [
        Table("bags", num_rows, 64, IDS, module="bags"),
        *(
            Table(name, num_rows, 64, IDS, pooled=False, module="sequences")
            for name in ("users", "items")
        ),
    ]
    if exponent is not None:
        tables = [*with_expected_profile(tables, batch_size=BATCH_SIZE, exponent=exponent)]
    topology = Topology(RANKS, 40 * GIB, compute_device=device)
    return ShardingTask(tuple(tables), topology, BATCH_SIZE)


def plan_of(task: ShardingTask, dedup: tuple[str, ...] = ()) -> ShardingPlan:
    plan = ShardingPlan.from_ranks(task, range(len(task.tables)))
    return dataclasses.replace(plan, dedup=dedup)


@pytest.fixture(scope="module")
def model() -> LearnedCostModel:
    return prior_cost_model(RunContext("cuda", Hardware(SPEC.device_name)))


@pytest.mark.parametrize("exponent", [0.0, 0.8, 1.2])
def test_ranks_send_the_different_ids_of_their_samples(exponent: float) -> None:
    task = task_of(exponent)
    rows = np.random.default_rng(0)
    num_ids = int(BATCH_SIZE * IDS)
    weights = (1.0 + np.arange(task.tables[1].num_embeddings)) ** -exponent
    ids = rows.choice(len(weights), size=(RANKS, num_ids // RANKS), p=weights / weights.sum())
    sent = sum(len(np.unique(of_rank)) for of_rank in ids)

    bags, users, _ = deduplicated(task, ["sequences"]).tables

    assert bags == task.tables[0]
    assert BATCH_SIZE * users.pooling_factor == pytest.approx(sent, rel=0.05)
    assert users.repeats is not None
    assert users.repeats * users.pooling_factor == pytest.approx(IDS)


@pytest.mark.parametrize("exponent", [0.0, 0.8, 1.2])
def test_the_ranks_together_still_use_the_same_ids(exponent: float) -> None:
    task = task_of(exponent)
    before, after = (
        workload_of_plan(plan_of(one), one).num_unique
        for one in (task, deduplicated(task, ["sequences"]))
    )
    assert after == pytest.approx(before, rel=1e-6)


def test_what_is_deduplicated_stays_as_it_is() -> None:
    task = task_of(0.8)
    once = deduplicated(task, ["sequences"])
    assert deduplicated(once, ["sequences"]) is once
    assert deduplicated(task, []) is task
    assert deduplicated(task, ["bags"]) is task
    assert sequence_modules(task) == ("sequences",)
    unknown = deduplicated(task_of(None), ["sequences"]).tables[1]
    assert (unknown.pooling_factor, unknown.repeats) == (IDS, 1.0)
    assert "repeats" not in unknown.to_json()


def test_exchanges_carry_fewer_ids_and_vectors_and_a_gather_is_paid(
    model: LearnedCostModel,
) -> None:
    task = task_of(1.2)
    fewer = deduplicated(task, ["sequences"])
    share = fewer.tables[1].pooling_factor / IDS
    assert share < 0.5
    volumes = [
        workload_of_plan(plan_of(one), one).exchange(for_ids=False).volume for one in (task, fewer)
    ]
    assert volumes[1] == pytest.approx(volumes[0] * [1, share, share, 1])

    cost = model.predict(plan_of(task, ("sequences",)), task)
    priced = model.price(task)
    assert priced.predict(plan_of(task, ("sequences",))) == cost
    without_sort = dataclasses.replace(priced.with_task(fewer), dedup=None).predict(plan_of(task))

    # both tables of 64 columns in fp32, and each rank has a quarter of the samples
    mb = 2 * BATCH_SIZE * IDS * 64 * 4 / RANKS / 1e6
    gather_ms = 2 * mb / (0.8 * SPEC.memory_gb_per_s)
    added = [
        now.fwd_comm_ms - before.fwd_comm_ms
        for now, before in zip(cost.per_rank, without_sort.per_rank, strict=True)
    ]
    assert added == pytest.approx([gather_ms] * RANKS)
    back_ms = [
        now.bwd_comm_ms - before.bwd_comm_ms
        for now, before in zip(cost.per_rank, without_sort.per_rank, strict=True)
    ]
    assert priced.repeated_ms == 0.0
    assert priced.with_task(fewer).repeated_ms == pytest.approx(added[0] + back_ms[0])
    assert cost.cost_ms < model.predict(plan_of(task), task).cost_ms
    assert cost.input_dist_ms is not None
    assert without_sort.input_dist_ms is not None
    prices, num_ids = gpu_dedup_prices(SPEC), 2 * BATCH_SIZE * IDS / RANKS
    num_passes = math.ceil(math.log2(2 * task.tables[1].num_embeddings) / 8)
    sort_ms = prices.launch_ms + num_ids / 1e6 * num_passes * prices.pass_ms
    assert cost.input_dist_ms[0] - without_sort.input_dist_ms[0] == pytest.approx(sort_ms)


@pytest.mark.parametrize(
    ("exponent", "num_rows", "dedup"),
    [(1.2, 100_000, ("sequences",)), (0.0, 100_000_000, ())],
    ids=["skewed", "uniform"],
)
def test_ids_are_deduplicated_where_that_pays(
    model: LearnedCostModel, exponent: float, num_rows: int, dedup: tuple[str, ...]
) -> None:
    task = dataclasses.replace(task_of(exponent, num_rows=num_rows), batch_size=16 * BATCH_SIZE)
    task = dataclasses.replace(
        task,
        tables=with_expected_profile(task.tables, batch_size=task.batch_size, exponent=exponent),
    )
    sharder = make_sharder("neuroshard", model, time_budget_s=0.2)
    costs = {}
    for choice in (None, (), ("sequences",)):
        plan, report = Planner(sharder, model, dedup=choice).plan(task)
        assert plan.dedup == (dedup if choice is None else choice)
        assert report.cost is not None
        assert report.lower_bound_ms is not None
        cost_ms = report.cost.cost_ms
        assert 0.5 * cost_ms < report.lower_bound_ms <= cost_ms * (1 + 1e-9)
        costs[choice] = report.cost.cost_ms
    assert (costs["sequences",] < costs[()]) == bool(dedup)


def test_a_plan_says_which_ids_are_deduplicated_if_any() -> None:
    task = task_of(0.8)
    assert "dedup" not in plan_of(task).to_json()
    plan = plan_of(task, ("sequences",))
    assert plan.to_json()["dedup"] == ["sequences"]
    assert ShardingPlan.from_json(plan.to_json()) == plan
    validate(plan, task)


def test_plans_are_refused_whose_ids_cannot_be_deduplicated() -> None:
    with pytest.raises(InvalidPlanError, match="'bags', which looks up no sequences"):
        validate(plan_of(task_of(0.8), ("bags",)), task_of(0.8))
    on_cpu = task_of(0.8, device="cpu")
    with pytest.raises(InvalidPlanError, match="on GPUs alone"):
        validate(plan_of(on_cpu, ("sequences",)), on_cpu)


def test_the_gain_of_a_split_contains_the_gather(model: LearnedCostModel) -> None:
    task = task_of(1.2)
    halves = [Shard("users", i, (0, 100_000), (32 * i, 32 * i + 32)) for i in range(2)]
    others = [Shard.whole(task.tables[0], 2), Shard.whole(task.tables[2], 3)]
    plan = ShardingPlan(RANKS, (*halves, *others), dedup=("sequences",))
    priced = model.price(deduplicated(task, plan.dedup))
    (split,) = diagnose(plan, priced, alternatives=False).splits
    whole_ms = min(
        priced.predict(
            dataclasses.replace(plan, shards=(Shard.whole(task.tables[1], rank), *others))
        ).cost_ms
        for rank in range(RANKS)
    )
    assert split.gain_ms == pytest.approx(whole_ms - priced.predict(plan).cost_ms)


def test_column_shards_are_sorted_each() -> None:
    """TorchRec looks up a table once for each of its column shards, and sorts its ids for each.

    Whole tables beside them have a lookup of their own, so ids are deduplicated by two launches.
    """
    task = deduplicated(task_of(0.8), ["sequences"])
    halves = [Shard("users", i, (0, 100_000), (32 * i, 32 * i + 32)) for i in range(2)]
    others = [Shard.whole(task.tables[0], 2), Shard.whole(task.tables[2], 3)]
    prices = gpu_dedup_prices(SPEC)
    whole, split = (
        prices.added_ms(workload_of_plan(plan, task))
        for plan in (plan_of(task), ShardingPlan(RANKS, (*halves, *others)))
    )
    assert split[0] - 2 * prices.launch_ms == pytest.approx(1.5 * (whole[0] - prices.launch_ms))
    assert split[1:] == pytest.approx(whole[1:])
