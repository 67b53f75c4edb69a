"""Packaged policies on hardware with other prices, before and after a re-tuning."""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Iterator

import numpy as np
import torch
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate

from benchmarks.compared import markdown, quiet
from dlrm_sharded.commands.hydra_app import CONF_DIR
from dlrm_sharded.commands.train_policy import initialize
from dlrm_sharded.cost.communication import EXCHANGES
from dlrm_sharded.cost.learned import LearnedCostModel, learned_cost_model
from dlrm_sharded.hardware.artifact_kinds import RETUNE
from dlrm_sharded.hardware.context import RunContext
from dlrm_sharded.plans.plan import whole_tables
from dlrm_sharded.plans.task import ShardingTask
from dlrm_sharded.rl.policy import METHODS, LearnedPolicy
from dlrm_sharded.rl.tasks import training_tasks
from dlrm_sharded.rl.training import TrainingMethod, build_method, train_policy
from dlrm_sharded.sharders.base import Sharder
from dlrm_sharded.sharders.heuristics import WEIGHTS, GreedySharder
from dlrm_sharded.sharders.policy import PolicySharder

TEST_SEED = 2**37


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--tasks", type=int, default=20, help="tasks of each kind [%(default)s]")
    parser.add_argument("--forward", type=float, default=2.0, help="[%(default)s] times as slow")
    parser.add_argument("--backward", type=float, default=5.0, help="likewise [%(default)s]")
    parser.add_argument("--exchanges", type=float, default=1.8, help="likewise [%(default)s]")
    parser.add_argument("overrides", nargs="*", default=RETUNE.split(), help="[%(default)s]")


def run(options: argparse.Namespace) -> None:
    quiet()
    torch.set_num_threads(1)
    header = ["policy", "tables", "best heuristic", "placed by", "before", "after", "CPU s"]
    print(markdown(header, list(_lines(options, scaled_model(options)))))


def scaled_model(options: argparse.Namespace) -> LearnedCostModel:
    """Return the packaged cost model with slower stages."""
    model = learned_cost_model(RunContext())
    return dataclasses.replace(
        model,
        compute=model.compute.scaled(forward=options.forward, backward=options.backward),
        communication=model.communication.scaled(dict.fromkeys(EXCHANGES, options.exchanges)),
    )


def _lines(options: argparse.Namespace, model: LearnedCostModel) -> Iterator[list[object]]:
    tasks = {part: _tasks(part, options.tasks) for part in ("training", "unseen")}
    heuristics = {
        part: {weight: _costs(GreedySharder(weight), of_part, model) for weight in WEIGHTS}
        for part, of_part in tasks.items()
    }
    for kind in options.methods:
        with initialize_config_dir(version_base="1.3", config_dir=str(CONF_DIR)):
            cfg = compose("train_policy", [f"policy={kind}", *options.overrides])
            num_samples = compose("plan", [f"sharder={kind}", "task=unused"]).sharder.num_samples
        method = build_method(instantiate(cfg.policy), seed=cfg.seed)
        initialize(method, cfg.init_from, RunContext())
        before = {part: _by_judge(method, of, model, num_samples) for part, of in tasks.items()}
        started = time.process_time()
        train_policy(
            method,
            instantiate(cfg.tasks),
            lambda task, ranks: model.predict(whole_tables(task, ranks), task),
            instantiate(cfg.schedule),
            is_trained=cfg.init_from is not None,
        )
        seconds = time.process_time() - started
        for part, of_part in tasks.items():
            after = _by_judge(method, of_part, model, num_samples)
            weight = min(WEIGHTS, key=lambda w: heuristics[part][w].mean())
            best = heuristics[part][weight]
            for judge, costs in after.items():
                yield [
                    *(kind, part, f"{best.mean():.2f} ms ({weight})", judge),
                    *(_text(each, best) for each in (before[part][judge], costs)),
                    f"{seconds:.0f}",
                ]


def _by_judge(
    method: TrainingMethod, tasks: list[ShardingTask], model: LearnedCostModel, num_samples: int
) -> dict[str, np.ndarray]:
    """Return the costs of plans that the policy alone chose, and of those chosen by the prices."""
    policy, kind = LearnedPolicy(method.net), method.net.kind
    alone = PolicySharder(policy, name=kind, num_samples=num_samples)
    priced = PolicySharder(policy, name=kind, num_samples=num_samples, cost_model=model)
    return {"the policy": _costs(alone, tasks, model), "prices": _costs(priced, tasks, model)}


def _tasks(part: str, num: int) -> list[ShardingTask]:
    pool, rng = training_tasks(part=part), np.random.default_rng(TEST_SEED)
    return [pool.task(pool.draw(rng)) for _ in range(num)]


def _costs(sharder: Sharder, tasks: list[ShardingTask], model: LearnedCostModel) -> np.ndarray:
    return np.array([model.predict(sharder.shard(task), task).cost_ms for task in tasks])


def _text(costs: np.ndarray, best: np.ndarray) -> str:
    """Return the mean cost, and the mean and largest ratio to the best heuristic."""
    ratios = costs / best
    return f"{costs.mean():.2f} ms (x {ratios.mean():.3f}, worst {ratios.max():.3f})"
