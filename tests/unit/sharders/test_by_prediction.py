"""The search on cost models that only predict: near the best, within constraints, repeatable."""

import dataclasses
import math

import pytest

from dlrm_sharded import (
    ConfigError,
    Constraints,
    InfeasibleTaskError,
    NeuroShardSharder,
    PlanCost,
    Planner,
    SharderContext,
    ShardingPlan,
    validate,
)
from dlrm_sharded.accesses.profiles import with_profiles
from dlrm_sharded.datasets.task_sets import TASK_SETS
from dlrm_sharded.plans.layouts import is_row_wise
from dlrm_sharded.plans.plan_cost import STAGES
from dlrm_sharded.testing import check_sharder, small_tasks
from tests.unit.made_up import tables_of, task_of, with_memory, with_topology
from tests.unit.search.made_up import COST_ALONE, MODELS, all_plans, model_of, tiny_task

ROUNDS = {"time_budget_s": None, "patience": 3}
PAPER = [with_profiles(made.task) for made in TASK_SETS["paper"](num=3)]


class OnlyPredicts:
    """Hides that a model is additive, and counts what it is asked."""

    def __init__(self, model):
        self.model, self.num_asked = model, 0

    def predict(self, plan, task):
        self.num_asked += 1
        return self.model.price(task).predict(plan)


class Together(OnlyPredicts):
    """Predicts many plans at once, and no single one."""

    def predict(self, plan, task):
        raise AssertionError("it was asked for one plan")

    def predict_plans(self, plans, task):
        return [OnlyPredicts.predict(self, plan, task) for plan in plans]


def by_prediction(model, constraints=None, **keys):
    context = SharderContext(cost_model=model)
    return NeuroShardSharder(context, constraints or Constraints(), **(ROUNDS | keys))


def cost_ms(model, plan, task):
    return model.price(task).predict(plan).cost_ms


@pytest.mark.parametrize(
    ("name", "number"),
    [("shipped", 0), ("shipped", 1), *((name, 2) for name in MODELS if name != "receiving")],
)
def test_is_near_the_search_that_knows_the_prices(name, number):
    model, task = model_of(name), PAPER[number]
    priced = by_prediction(model).shard(task)
    plan = by_prediction(OnlyPredicts(model)).shard(task)
    validate(plan, task)
    assert cost_ms(model, plan, task) <= 1.03 * cost_ms(model, priced, task)


class Crowded:
    """A model that is not additive: tables of a rank slow each other down, by their number."""

    def __init__(self, model):
        self.model = model

    def predict(self, plan, task):
        cost = self.model.price(task).predict(plan)
        num_shards = [len(shards) for shards in plan.shards_by_rank()]
        slowed = [
            rank.with_stages({stage: rank.stage_ms(stage) * (1 + 0.3 * n) for stage in STAGES})
            for rank, n in zip(cost.per_rank, num_shards, strict=True)
        ]
        return PlanCost(tuple(slowed))


@pytest.mark.parametrize("seed", range(4))
def test_is_near_the_best_of_all_plans_under_a_model_that_is_not_additive(seed):
    task = tiny_task(seed, num_tables=3)
    model = Crowded(model_of("plain"))
    world_size = task.topology.world_size
    best_ms = min(
        model.predict(ShardingPlan(world_size, shards), task).cost_ms for shards in all_plans(task)
    )
    plan = by_prediction(model, **COST_ALONE).shard(task)
    assert model.predict(plan, task).cost_ms <= 1.1 * best_ms


def test_a_model_that_predicts_together_is_asked_together_and_decides_alike():
    one, many = OnlyPredicts(model_of("shipped")), Together(model_of("shipped"))
    task = PAPER[2]
    assert by_prediction(one).shard(task) == by_prediction(many).shard(task)
    assert one.num_asked == many.num_asked > 0


@pytest.mark.parametrize("task", small_tasks().values(), ids=small_tasks())
def test_conforms(task):
    check_sharder(lambda: by_prediction(OnlyPredicts(model_of("plain"))), with_profiles(task))


def is_split_by_rows(plan, task):
    shards = plan.shards_by_table()
    return any(is_row_wise(shards[table.name], table) for table in task.tables)


@pytest.mark.parametrize("key", ["split", "rows", "replicate"])
def test_keeps_what_is_never_done(key):
    task = PAPER[2]
    constraints = Constraints(**{key: "never"})
    plan = by_prediction(OnlyPredicts(model_of("shipped")), constraints).shard(task)
    free = by_prediction(OnlyPredicts(model_of("shipped"))).shard(task)
    num_shards = sum(not shard.replicated for shard in plan.shards)
    done = {
        "split": num_shards > len(task.tables) - len(plan.replicated_tables),
        "rows": is_split_by_rows(plan, task),
        "replicate": bool(plan.replicated_tables),
    }
    assert not done[key]
    assert free.replicated_tables
    assert len(free.shards) > len(task.tables)


def test_keeps_ranks_and_company():
    task = PAPER[2]
    names = [table.name for table in task.tables]
    constraints = Constraints(
        pin={names[0]: [2]}, together=[names[1:4]], apart=[names[4:7]], unsplit=names[7:9]
    )
    plan = by_prediction(OnlyPredicts(model_of("shipped")), constraints).shard(task)
    ranks = {n: [s.rank for s in shards] for n, shards in plan.shards_by_table().items()}
    assert ranks[names[0]] == [2]
    assert len({tuple(ranks[name]) for name in names[1:4]}) == 1
    apart = [set(ranks[name]) for name in names[4:7]]
    assert sum(map(len, apart)) == len(set.union(*apart))
    assert all(len(set(ranks[name])) == 1 for name in names[7:9])


def test_keeps_memory_where_tables_must_be_split():
    tables = tables_of(*[(1000, 64, 3.0)] * 4, (4000, 64, 1.0))
    task = with_profiles(with_memory(task_of(tables, 3), 4 * 64 * 2800))
    plan = by_prediction(OnlyPredicts(model_of("plain"))).shard(task)
    validate(plan, task)
    with pytest.raises(InfeasibleTaskError, match="no plan can fit"):
        by_prediction(OnlyPredicts(model_of("plain"))).shard(with_memory(task, 4 * 64 * 2000))


def test_on_hosts_of_several_ranks():
    task = with_topology(PAPER[2], local_world_size=2)
    model = model_of("links")
    plan = by_prediction(OnlyPredicts(model)).shard(task)
    priced = by_prediction(model).shard(task)
    assert cost_ms(model, plan, task) <= 1.05 * cost_ms(model, priced, task)


def test_claims_no_bound():
    model = OnlyPredicts(model_of("shipped"))
    _, report = Planner(by_prediction(model), model).plan(PAPER[2])
    assert (report.lower_bound_ms, report.gap, report.diagnosis) == (None, None, None)


def test_without_time_keeps_a_first_plan_and_says_so(caplog):
    model = OnlyPredicts(model_of("shipped"))
    plan = by_prediction(model, time_budget_s=1e-9).shard(PAPER[2])
    validate(plan, PAPER[2])
    assert "sharder.time_budget_s is over" in caplog.messages[-1]


class Broken:
    """Predicts what is no prediction of a plan, or fails."""

    def __init__(self, spoil):
        self.spoil = spoil

    def predict(self, plan, task):
        return self.spoil(model_of("plain").predict(plan, task))


def fail(cost):
    raise KeyError("t7")


BROKEN = {
    "fails": (fail, "the cost model Broken failed at a plan of .*: KeyError: 't7'"),
    "nan": (
        lambda cost: cost.with_added(STAGES[0], [math.nan] * len(cost.per_rank)),
        "the cost model Broken predicts nan ms for rank 0",
    ),
    "negative": (
        lambda cost: cost.with_added(STAGES[0], [-1e9] * len(cost.per_rank)),
        "the cost model Broken predicts -.* ms for rank 0",
    ),
    "too_few_ranks": (
        lambda cost: dataclasses.replace(cost, per_rank=cost.per_rank[1:]),
        "the cost model Broken predicted 3 ranks of 4",
    ),
    "no_cost": (lambda cost: cost.cost_ms, "the cost model Broken returned .*, no PlanCost"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_model_is_named_in_one_message(name):
    spoil, said = BROKEN[name]
    with pytest.raises(ConfigError, match=said):
        by_prediction(Broken(spoil)).shard(PAPER[2])


def test_a_model_that_predicts_too_few_plans_is_named():
    class Short(Together):
        def predict_plans(self, plans, task):
            return super().predict_plans(plans[1:], task)

    with pytest.raises(ConfigError, match=r"Short\.predict_plans returned 0 costs of 1 plans"):
        by_prediction(Short(model_of("plain"))).shard(PAPER[2])


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"constraints": Constraints(warm_start="plan.json")}, "warm_start"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_says_what_needs_prices(keys, said):
    with pytest.raises(ConfigError, match=rf"sharder\.{said} is .*OnlyPredicts only predicts"):
        by_prediction(OnlyPredicts(model_of("plain")), **keys).shard(PAPER[2])


def test_stated_precisions_are_those_of_the_plan():
    model = OnlyPredicts(model_of("plain"))
    sharder = by_prediction(model, exchange_precision="fp16", table_precision="fp16")
    plan = sharder.shard(PAPER[2])
    assert str(plan.exchange_precision) == "fp16"
    names = {table.name for table in PAPER[2].tables}
    assert plan.half_tables() == sorted(names - set(plan.replicated_tables)), "replicas are in fp32"
    assert plan.half_tables()
