"""Plans on made-up hardware, by packaged prices and by those of it, all judged by the true prices.

Each kind of hardware is the packaged model with other prices, so nothing is measured. Compared are

- prices: what a first start chooses in 20 s, and what a collection draws in two and in ten minutes,
  adapts the packaged prices. With `--gpu`, a GPU's prior is the packaged model and nothing adapts
  it; tasks are some of the papers' and MLPerf's.
- journals: each journal of runs, some of which are bad, corrects the packaged prices, those of a
  first start, and those of a collection of two minutes.
- policies: the papers' policies place by the costs that their networks predict for the hardware of
  the training, or read the prices of a first start, or the true ones; with `--retuned`, they are
  also trained on the true prices for about as long. The searches are told the true prices; they
  replicate nothing, and the second one splits nothing either.

On this machine, or on what switches of the libraries make of it, `elsewhere` measures the same.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch

from benchmarks.figures import prices_table
from benchmarks.made_up_hardware import MADE_UP, MadeUpBench, true_prices
from benchmarks.mlperf_steps import MLPERF_BATCH_SIZES, mlperf_task, prior_model
from benchmarks.planners import neuroshard, on_device, planner_of
from benchmarks.spoiled_runs import journals, read_again, run_of
from dlrm_sharded.calibration.first_start import adapted_to
from dlrm_sharded.cost.learned import LearnedCostModel, shipped_prior
from dlrm_sharded.datasets.paper_tables import PAPER_SETS
from dlrm_sharded.datasets.task_sets import measured_tasks
from dlrm_sharded.fitting.from_prior import adapted
from dlrm_sharded.fitting.picture import START_S, corrected
from dlrm_sharded.fitting.samples import Sample
from dlrm_sharded.hardware.context import RunContext
from dlrm_sharded.hardware.gpus.gpu_specs import gpu_specs
from dlrm_sharded.plans.plan import whole_tables
from dlrm_sharded.plans.standing import Standing
from dlrm_sharded.plans.task import ShardingTask
from dlrm_sharded.rl.autoshard import AutoShardConfig
from dlrm_sharded.rl.dreamshard import DreamShardConfig
from dlrm_sharded.rl.policy import ALWAYS, NEVER, LearnedPolicy, packaged_net
from dlrm_sharded.rl.tasks import training_tasks
from dlrm_sharded.rl.training import RoundSchedule, build_method, train_policy
from dlrm_sharded.sharders.base import Sharder, SharderContext
from dlrm_sharded.sharders.policy import PolicySharder, policy_sharder
from studies.parts import option
from studies.processes import quiet
from studies.study import Case, Row

BASIS = "predicted"
START_SEED, RUN_SEED = 1000, 2000
"""Seeds of the tasks of first starts and of runs, which are none of those that are compared."""

PRIOR_ERROR = 0.7
"""Stated error of the packaged prices on other hardware."""

PACKAGED, TRUE, TORCHREC = "packaged", "true", "torchrec"
FIRST_START, TWO_MINUTES = f"first start ({START_S:.0f} s)", "two minutes"
CALIBRATIONS = {TWO_MINUTES: 120.0, "ten minutes": 600.0}
NO_RUNS, NUM_RUNS = "no runs", 10
NUM_OF_SET = {
    "neuroshard_table_1": 12,
    "neuroshard_table_2": 6,
    "dreamshard_table_1": 10,
    "autoshard_synthetic": 4,
}
"""Most tasks of each packaged set for GPUs."""

NUM_SAMPLES = {"dreamshard": 16, "autoshard": 4}
"""Methods, and how many placements their yamls draw."""

SEARCHES: dict[str, dict[str, Any]] = {
    "no replicas": {"replicate": "never"},
    "whole tables": {"replicate": "never", "split": "never", "rows": "never"},
}
SHORT = {
    "dreamshard": DreamShardConfig(cost_updates=400, policy_updates=25),
    "autoshard": AutoShardConfig(cost_updates=400, rollouts=25),
}
SHORT_SCHEDULE = RoundSchedule(num_rounds=1, plans_per_round=200)
"""A training in one round of 10 to 14 s of CPU time."""


@dataclass(frozen=True, slots=True)
class Contender:
    """A sharder whose plans are compared, and what it is told.

    Args:
        prices: the prices that it is told; None if it predicts nothing.
        over: contenders whose plans cost what its own are compared with, by columns of the report.
    """

    sharder: Sharder
    prices: LearnedCostModel | None = None
    over: Mapping[str, str] = field(default_factory=dict)


def cases(options: argparse.Namespace) -> Iterator[Case]:
    for kind in options.kinds:
        yield Case(kind, functools.partial(_rows, options, kind))


def _rows(options: argparse.Namespace, kind: str) -> list[Row]:
    quiet()
    torch.set_num_threads(1)
    packaged = prior_model(gpu_specs()[options.gpu]) if options.gpu else _packaged()
    true = true_prices(packaged, kind)
    contenders = COMPARISONS[options.compare](packaged, true, options)
    rows: list[Row] = []
    for number, task in enumerate(_tasks(options)):
        sharders = {id(found.sharder): found.sharder for found in contenders.values()}
        plans = {key: sharder.shard(task) for key, sharder in sharders.items()}
        cost_ms = {key: true.predict(plan, task).cost_ms for key, plan in plans.items()}
        for name, found in contenders.items():
            key, prices = id(found.sharder), found.prices
            over = {by: cost_ms[id(contenders[other].sharder)] for by, other in found.over.items()}
            row = {"kind": kind, "number": number, "plans_by": name, "cost_ms": cost_ms[key]}
            if prices is not None:
                row["predicted_ms"] = prices.predict(plans[key], task).cost_ms
                row["stated"] = prices.standing and prices.standing.error
            rows.append(row | {"over": over})
        print(f"{kind}: task {number}, {len(plans)} plans", flush=True)
    return rows


def _packaged() -> LearnedCostModel:
    standing = Standing("prior", PACKAGED, error=PRIOR_ERROR)
    return dataclasses.replace(shipped_prior(RunContext()), standing=standing)


def _tasks(options: argparse.Namespace) -> list[ShardingTask]:
    """Return the tasks that plans are compared on; for policies, of tables not trained on, too."""
    num, seed, ranks = options.tasks, options.seed, options.world_size
    if options.gpu:
        sets = {name: PAPER_SETS[name](num=min(num, size)) for name, size in NUM_OF_SET.items()}
        tasks = [found.task for by_set in sets.values() for found in by_set]
        spec = gpu_specs()[options.gpu]
        tasks += [mlperf_task(*sizes, spec) for sizes in [*MLPERF_BATCH_SIZES.items()][:num]]
        return [on_device(task, "cuda") for task in tasks]
    if options.compare != "policies":
        return _measured_tasks(seed, num, ranks)
    pool = training_tasks(part="unseen", batch_sizes=[2048, 8192], world_size=ranks)
    rng = np.random.default_rng([seed, 1])
    unseen = [pool.task(pool.draw(rng)) for _ in range(num)]
    return [*unseen, *_measured_tasks(500 + seed, num, ranks)]


def _measured_tasks(seed: int, num: int, world_size: int) -> list[ShardingTask]:
    found = measured_tasks(seed, num=num, world_size=world_size)
    return [on_device(entry.task, "cpu") for entry in found]


def _adapted(
    packaged: LearnedCostModel, samples: Sequence[Sample], kind: Literal["measured", "calibrated"]
) -> LearnedCostModel:
    """Return the packaged prices, adapted to samples, with the error that they would state."""
    found = adapted_to(packaged, samples)
    error = found.stated_error if kind == "measured" else found.expected_error
    standing = Standing(kind, PACKAGED, error=error, rank_error=found.rank_error)
    return dataclasses.replace(adapted(packaged, samples), standing=standing)


def _first_start(
    bench: MadeUpBench, packaged: LearnedCostModel, options: argparse.Namespace
) -> list[Sample]:
    [task] = _measured_tasks(START_SEED + options.seed, 1, options.world_size)
    return bench.first_start(packaged, task.tables, task.batch_size)


def _by_prices(
    packaged: LearnedCostModel, true: LearnedCostModel, options: argparse.Namespace
) -> dict[str, Contender]:
    """Return searches by packaged prices, by all that time on the hardware makes of them, and true.

    Only GPUs have no bench that is made up.
    """
    prices = {PACKAGED: packaged}
    if not options.gpu:
        bench = MadeUpBench(true, options.seed)
        samples = _first_start(bench, packaged, options)
        prices[FIRST_START] = _adapted(packaged, samples, "measured")
        for name, seconds in CALIBRATIONS.items():
            prices[name] = _adapted(packaged, bench.collected(seconds), "calibrated")
    device = "cuda" if options.gpu else "cpu"
    over = {TRUE: TRUE, TORCHREC: TORCHREC}
    found = {
        name: Contender(neuroshard(of), of, over) for name, of in [*prices.items(), (TRUE, true)]
    }
    return found | {TORCHREC: Contender(planner_of(TORCHREC, device=device).sharder, None, over)}


def _after_journals(
    packaged: LearnedCostModel, true: LearnedCostModel, options: argparse.Namespace
) -> dict[str, Contender]:
    """Return searches by prices that each journal corrects, beginning from three kinds of them."""
    bench = MadeUpBench(true, options.seed)
    start = _first_start(bench, packaged, options)
    calibration = bench.collected(CALIBRATIONS[TWO_MINUTES])
    before = {
        PACKAGED: packaged,
        FIRST_START: _adapted(packaged, start, "measured"),
        TWO_MINUTES: _adapted(packaged, calibration, "calibrated"),
    }
    found = {TRUE: Contender(neuroshard(true), true, {TRUE: TRUE, NO_RUNS: TRUE})}
    tasks = _measured_tasks(RUN_SEED + options.seed, NUM_RUNS, options.world_size)
    for title, prices in before.items():
        rng, search = np.random.default_rng([RUN_SEED, options.seed]), neuroshard(prices)
        runs = [run_of(search.shard(task), task, true, rng) for task in tasks]
        for journal, lines in ((NO_RUNS, []), *journals(runs, rng)):
            started = (packaged, start) if title == FIRST_START else None
            after = corrected(prices, read_again(lines), started=started)
            over = {TRUE: TRUE, NO_RUNS: f"{title}, {NO_RUNS}"}
            sharder = search if after is prices else neuroshard(after)
            found[f"{title}, {journal}"] = Contender(sharder, after, over)
    return found


def _policies(
    packaged: LearnedCostModel, true: LearnedCostModel, options: argparse.Namespace
) -> dict[str, Contender]:
    """Return the searches, and each policy with all prices that it may be told."""
    over, told = {name: name for name in SEARCHES}, SharderContext(cost_model=true)
    found = {
        name: Contender(neuroshard(true, **keys), true, over) for name, keys in SEARCHES.items()
    }
    samples = _first_start(MadeUpBench(true, options.seed), packaged, options)
    started = SharderContext(cost_model=adapted(packaged, samples))
    for method, num_samples in NUM_SAMPLES.items():
        build = functools.partial(policy_sharder, method=method, num_samples=num_samples)
        sharders: dict[str, Sharder] = {
            "as published": build(told, prices=NEVER),
            FIRST_START: build(started, prices=ALWAYS),
            TRUE: build(told, prices=ALWAYS),
        }
        if options.retuned:
            sharders["re-tuned"] = PolicySharder(
                _retuned(method, true),
                name=method,
                num_samples=num_samples,
                complete=told.with_profiles,
            )
        found |= {f"{method}, {of}": Contender(it, None, over) for of, it in sharders.items()}
    return found


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


Compare = Callable[
    [LearnedCostModel, LearnedCostModel, argparse.Namespace], Mapping[str, Contender]
]
COMPARISONS: dict[str, Compare] = {
    "prices": _by_prices,
    "journals": _after_journals,
    "policies": _policies,
}
OPTIONS = {
    "compare": option("prices", "what is compared", choices=COMPARISONS),
    "kinds": option(MADE_UP, "kinds of hardware, which may have any factors"),
    "gpu": option(str, "GPU whose prior is the packaged model, for prices"),
    "tasks": option(4, "tasks of each set; policies have two"),
    "world_size": option(4, "ranks"),
    "seed": option(0, "seed of tasks, plans and noise"),
    "retuned": {"action": "store_true", "help": "also train the policies on the true prices"},
}


def report(rows: Sequence[Row], reference: str | None) -> str:
    """Write errors of predictions, and costs of plans over others', by hardware and contender."""
    table = prices_table(rows, ("kind", "plans_by"))
    return f"the slowest rank by the true prices, means over tasks:\n\n{table}"
