"""The papers' policies on made-up hardware that they were not trained on, against the search.

They place as published, by the costs that their networks predict for the hardware of the training,
or they read prices: those of a simulated first start of 20 s, or the true ones; with `--retuned`,
they are also trained on the true prices for about as long. All plans are judged by the true prices.
The search is told the true prices; it replicates nothing, and in the second comparison it splits
nothing either.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch

from benchmarks.figures import interval_text
from benchmarks.first_start import MADE_UP, START_SEED, Kind, MadeUpBench
from dlrm_sharded.cost.learned import LearnedCostModel, shipped_prior
from dlrm_sharded.datasets.task_sets import measured_tasks
from dlrm_sharded.files.text_table import Column, TextTable
from dlrm_sharded.fitting.from_prior import adapted
from dlrm_sharded.hardware.context import RunContext
from dlrm_sharded.plans.plan import whole_tables
from dlrm_sharded.plans.task import ShardingTask
from dlrm_sharded.rl.autoshard import AutoShardConfig
from dlrm_sharded.rl.dreamshard import DreamShardConfig
from dlrm_sharded.rl.policy import ALWAYS, NEVER, LearnedPolicy, packaged_net
from dlrm_sharded.rl.tasks import training_tasks
from dlrm_sharded.rl.training import RoundSchedule, build_method, train_policy
from dlrm_sharded.sharders.base import Sharder, SharderContext
from dlrm_sharded.sharders.neuroshard import neuroshard_sharder
from dlrm_sharded.sharders.policy import PolicySharder, policy_sharder
from studies.parts import option
from studies.processes import quiet
from studies.study import Case, Row

BASIS = "predicted"
NUM_SAMPLES = {"dreamshard": 16, "autoshard": 4}
"""Methods, and how many placements their yamls draw."""

REFERENCES = {
    "no replicas": {"replicate": "never"},
    "whole tables": {"replicate": "never", "split": "never", "rows": "never"},
}
HARDWARE = {"home": Kind(), "forward x 3": Kind(forward=3.0), "launches x 6": Kind(launches=6.0)}
HARDWARE |= MADE_UP

SHORT = {
    "dreamshard": DreamShardConfig(cost_updates=400, policy_updates=25),
    "autoshard": AutoShardConfig(cost_updates=400, rollouts=25),
}
SHORT_SCHEDULE = RoundSchedule(num_rounds=1, plans_per_round=200)
"""A training in one round of 10 to 14 s of CPU time."""

OPTIONS = {
    "tasks": option(6, "tasks of 50 unseen tables, and as many of a laptop's size"),
    "world_size": option(4, "ranks"),
    "kinds": option((), "kinds of hardware; all by default", nargs="*"),
    "seed": option(0, "seed of tasks and noise"),
    "retuned": {"action": "store_true", "help": "also train the policies on the true prices"},
}


def cases(options: argparse.Namespace) -> Iterator[Case]:
    for name in options.kinds or HARDWARE:
        yield Case(name, functools.partial(_rows, options, name))


def _rows(options: argparse.Namespace, name: str) -> list[Row]:
    quiet()
    torch.set_num_threads(1)
    packaged = shipped_prior(RunContext())
    true = HARDWARE[name].applied(packaged)
    sharders = _sharders(packaged, true, options.seed, retuned=options.retuned)
    rows: list[Row] = []
    for number, task in enumerate(_tasks(options)):
        for (sharder, prices), made in sharders.items():
            cost_ms = true.predict(made.shard(task), task).cost_ms
            plan = {"sharder": sharder, "prices": prices, "cost_ms": cost_ms}
            rows.append({"kind": name, "number": number, **plan})
    print(f"{name}: {len(rows)} plans", flush=True)
    return rows


def _tasks(options: argparse.Namespace) -> list[ShardingTask]:
    """Return tasks of tables that no policy was trained on."""
    pool = training_tasks(part="unseen", batch_sizes=[2048, 8192], world_size=options.world_size)
    rng = np.random.default_rng([options.seed, 1])
    unseen = [pool.task(pool.draw(rng)) for _ in range(options.tasks)]
    seed, num = 500 + options.seed, options.tasks
    measured = measured_tasks(seed, num=num, world_size=options.world_size)
    return [*unseen, *(found.task for found in measured)]


def _sharders(
    packaged: LearnedCostModel, true: LearnedCostModel, seed: int, *, retuned: bool
) -> dict[tuple[str, str], Sharder]:
    """Return sharders by their names and those of their prices."""
    told = SharderContext(cost_model=true)
    sharders: dict[tuple[str, str], Sharder] = {
        ("neuroshard", name): neuroshard_sharder(told, **keys) for name, keys in REFERENCES.items()
    }
    [found] = measured_tasks(START_SEED + seed, num=1)
    bench = MadeUpBench(true, seed)
    samples = bench.first_start(packaged, found.task.tables, found.task.batch_size)
    started = SharderContext(cost_model=adapted(packaged, samples))
    for method, num_samples in NUM_SAMPLES.items():
        build = functools.partial(policy_sharder, method=method, num_samples=num_samples)
        sharders[method, "as published"] = build(told, prices=NEVER)
        sharders[method, "first start"] = build(started, prices=ALWAYS)
        sharders[method, "true"] = build(told, prices=ALWAYS)
        if retuned:
            policy = _retuned(method, true)
            sharders[method, "re-tuned"] = PolicySharder(
                policy, name=method, num_samples=num_samples, complete=told.with_profiles
            )
    return sharders


def _retuned(method: str, true: LearnedCostModel) -> LearnedPolicy:
    training = build_method(SHORT[method], seed=0)
    training.net.load_state_dict(packaged_net(method, RunContext()).state_dict())
    train_policy(
        training,
        training_tasks(),
        lambda task, ranks: true.predict(whole_tables(task, ranks), task),
        SHORT_SCHEDULE,
        is_trained=True,
    )
    return LearnedPolicy(training.net)


def report(rows: Sequence[Row], reference: str | None) -> str:
    """Write the costs of the policies' plans over those of both searches, by hardware."""
    lines = []
    for kind in dict.fromkeys(row["kind"] for row in rows):
        costs: dict[tuple[str, str], dict[int, float]] = {}
        for row in rows:
            if row["kind"] == kind:
                plans = costs.setdefault((row["sharder"], row["prices"]), {})
                plans[row["number"]] = row["cost_ms"]
        for (sharder, prices), plans in costs.items():
            if sharder in NUM_SAMPLES:
                searches = (costs["neuroshard", name] for name in REFERENCES)
                figures = (text for search in searches for text in _over(plans, search))
                lines.append([kind, sharder, prices, *figures])
    columns: list[Column | str] = ["hardware", "policy", "prices"]
    for name in REFERENCES:
        columns += [f"over the search, {name} [95 %]", Column("worst", ".2f")]
    return TextTable(columns, lines).markdown()


def _over(plans: Mapping[int, float], search: Mapping[int, float]) -> tuple[str, float]:
    """Return the mean of costs over those of a search as text, and the largest one."""
    ratios = [cost / search[number] for number, cost in plans.items()]
    return interval_text(ratios, ".3f"), max(ratios)
