"""CostsBySeed of trained policies on unseen tables and on other numbers of tables and ranks."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate

from benchmarks.compared import (
    add_row_arguments,
    interval_text,
    markdown,
    planner_of,
    quiet,
    rows_of,
)
from dlrm_sharded.commands.hydra_app import CONF_DIR
from dlrm_sharded.cost.base import CostModel
from dlrm_sharded.files.errors import InfeasibleTaskError
from dlrm_sharded.plans.plan import whole_tables
from dlrm_sharded.plans.task import ShardingTask
from dlrm_sharded.rl.policy import METHODS, LearnedPolicy
from dlrm_sharded.rl.tasks import TaskPool, training_tasks
from dlrm_sharded.rl.training import RoundSchedule, build_method, train_policy
from dlrm_sharded.sharders.base import Sharder
from dlrm_sharded.sharders.heuristics import WEIGHTS
from dlrm_sharded.sharders.policy import PolicySharder
from studies.study import Case, Row

TRAINING_SIZE = (50, 4)
"""Numbers of tables and ranks that policies are trained on."""

SIZES = (
    *((20, 4), TRAINING_SIZE, (100, 4), (200, 4), (500, 4)),
    *((50, 2), (50, 8), (50, 16), (50, 64), (500, 16), (500, 64)),
)
UNSEEN_SHARES = (0.0, 0.5)
"""Shares of unseen tables that are tried at the training size, beside 1.0 at every size."""

PAPER = "neuroshard_paper"
TEST_SEED = 2**36
TEST_BATCH_SIZE = 4096


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument(
        "--seeds", type=int, default=3, help="trainings of each method [%(default)s]"
    )
    parser.add_argument("--tasks", type=int, default=50, help="tasks of each size [%(default)s]")
    parser.add_argument(
        "--sizes", nargs="+", type=_size, default=SIZES, help="tables x ranks, such as 100x4"
    )
    parser.add_argument(
        "--own", nargs="*", type=_size, default=(), help="sizes that policies are also trained on"
    )
    parser.add_argument(
        "--num-rounds", type=int, default=10, help="rounds of a training [%(default)s]"
    )
    add_row_arguments(parser, row="plan")


def run(options: argparse.Namespace) -> None:
    quiet()
    torch.set_num_threads(1)
    report(rows_of(options, _cases(options)))


@dataclass(frozen=True, slots=True)
class TaskKind:
    """Random tasks of one size.

    Args:
        unseen: share of the tables that no policy was trained on.
    """

    num_tables: int
    num_ranks: int
    unseen: float

    def __str__(self) -> str:
        return f"{self.num_tables} x {self.num_ranks}"

    def tasks(self, num: int) -> list[ShardingTask]:
        rng = np.random.default_rng([TEST_SEED, self.num_tables, self.num_ranks])
        pools = [_pool(self.num_tables, self.num_ranks, part) for part in ("training", "unseen")]
        joined = pools[0].mix(pools[1], self.unseen)
        return [joined.task(joined.draw(rng)) for _ in range(num)]


def _cases(options: argparse.Namespace) -> Iterator[Case]:
    """Yield a case for each sharder and kind of task; its rows are its plans."""
    planner = planner_of(f"{PAPER},sharder.max_splits=0")
    model = planner.cost_model
    assert model is not None
    trained: dict[tuple[str, int], Sharder] = {}
    for method in options.methods:
        for seed in range(options.seeds):
            trained[method, seed] = _trained(method, seed, TRAINING_SIZE, model, options.num_rounds)
    sizes = dict.fromkeys([*options.sizes, TRAINING_SIZE])
    task_kinds = [TaskKind(num_tables, num_ranks, 1.0) for num_tables, num_ranks in sizes]
    task_kinds += [TaskKind(TRAINING_SIZE[0], TRAINING_SIZE[1], share) for share in UNSEEN_SHARES]
    for task_kind in task_kinds:
        others: dict[str, Sharder] = {PAPER: planner.sharder}
        others |= {name: planner_of(name).sharder for name in ("random", *WEIGHTS)}
        size = (task_kind.num_tables, task_kind.num_ranks)
        if size in options.own and task_kind.unseen == 1.0:
            for method in options.methods:
                others[f"{method}, own size"] = _trained(method, 0, size, model, options.num_rounds)
        tasks = task_kind.tasks(options.tasks)
        for (method, seed), sharder in trained.items():
            yield _case(task_kind, method, seed, sharder, tasks, model)
        for name, sharder in others.items():
            yield _case(task_kind, name, 0, sharder, tasks, model)


def _case(
    task_kind: TaskKind,
    name: str,
    seed: int,
    sharder: Sharder,
    tasks: Sequence[ShardingTask],
    model: CostModel,
) -> Case:
    key = f"{task_kind}, {task_kind.unseen:g} unseen, {name}, seed {seed}"
    return Case(key, lambda: list(_planned(task_kind, name, seed, sharder, tasks, model)))


def _planned(
    task_kind: TaskKind,
    name: str,
    seed: int,
    sharder: Sharder,
    tasks: Sequence[ShardingTask],
    model: CostModel,
) -> Iterator[Row]:
    for number, task in enumerate(tasks):
        started = time.perf_counter()
        try:
            plan = sharder.shard(task)
        except InfeasibleTaskError:
            plan = None
        yield {
            "num_tables": task_kind.num_tables,
            "num_ranks": task_kind.num_ranks,
            "unseen": task_kind.unseen,
            "sharder": name,
            "seed": seed,
            "number": number,
            "cost_ms": None if plan is None else model.predict(plan, task).cost_ms,
            "solve_s": time.perf_counter() - started,
        }


def _trained(
    method: str, seed: int, size: tuple[int, int], model: CostModel, num_rounds: int
) -> Sharder:
    """Train a policy on predicted costs, and print how long that took."""
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF_DIR)):
        config = instantiate(compose("train_policy", [f"policy={method}"]).policy)
        num_samples = compose("plan", [f"sharder={method}", "task=unused"]).sharder.num_samples
    learner = build_method(config, seed=seed)
    rounds = train_policy(
        learner,
        training_tasks(num_tables=size[0], world_size=size[1]),
        lambda task, ranks: model.predict(whole_tables(task, ranks), task),
        RoundSchedule(seed=seed, num_rounds=num_rounds),
    )
    seconds = sum(result.seconds for result in rounds)
    print(f"{method}, {size[0]} x {size[1]}, seed {seed}: trained in {seconds:.1f} s", flush=True)
    return PolicySharder(LearnedPolicy(learner.net), name=method, num_samples=num_samples)


def _pool(num_tables: int, num_ranks: int, part: str) -> TaskPool:
    return training_tasks(
        tables=["papers"],
        part=part,
        num_tables=num_tables,
        world_size=num_ranks,
        batch_sizes=[TEST_BATCH_SIZE],
    )


def report(rows: Sequence[Row]) -> None:
    """Print the means over tasks and over seeds."""
    by_kind: dict[TaskKind, list[Row]] = {}
    for row in rows:
        task_kind = TaskKind(row["num_tables"], row["num_ranks"], row["unseen"])
        by_kind.setdefault(task_kind, []).append(row)
    header = ["tables x ranks", "unseen", "sharder", "plans", f"over {PAPER}, no splits"]
    header += ["over the best heuristic", "by seed", "over training on that size", "s a plan"]
    lines: list[list[object]] = []
    for task_kind, kind_rows in by_kind.items():
        costs = _costs(kind_rows)
        best = min(WEIGHTS, key=lambda weight: np.mean(list(costs[weight, 0].values())))
        names = dict.fromkeys(row["sharder"] for row in kind_rows)
        lines += [
            [task_kind, f"{task_kind.unseen:.0%}", name, *_figures(name, kind_rows, costs, best)]
            for name in names
        ]
    print(markdown(header, lines))


CostsBySeed = Mapping[tuple[str, int], Mapping[int, float]]


def _costs(rows: Sequence[Row]) -> CostsBySeed:
    """Return the costs by (sharder, seed), then by task."""
    costs: dict[tuple[str, int], dict[int, float]] = {}
    for row in rows:
        by_task = costs.setdefault((row["sharder"], row["seed"]), {})
        if row["cost_ms"] is not None:
            by_task[row["number"]] = row["cost_ms"]
    return costs


def _figures(name: str, rows: Sequence[Row], costs: CostsBySeed, best: str) -> list[str]:
    seeds = sorted(seed for other, seed in costs if other == name)
    num = sum(len(costs[name, seed]) for seed in seeds)
    solve_s = [row["solve_s"] for row in rows if row["sharder"] == name]
    over_paper, over_best = (
        [_ratios(costs[name, seed], costs[other, 0]) for seed in seeds] for other in (PAPER, best)
    )
    by_seed = [float(np.mean(ratios)) for ratios in over_best]
    return [
        f"{num} / {len(solve_s)}",
        interval_text(np.mean(over_paper, axis=0), ".4f") if over_paper[0] else "-",
        f"{interval_text(np.mean(over_best, axis=0), '.4f')} ({best})",
        f"{min(by_seed):.4f} to {max(by_seed):.4f}" if len(seeds) > 1 else "-",
        _over_own_size(name, seeds, costs),
        f"{np.mean(solve_s):.3f}",
    ]


def _over_own_size(name: str, seeds: Sequence[int], costs: CostsBySeed) -> str:
    specialist = costs.get((f"{name}, own size", 0))
    if specialist is None:
        return "-"
    more_ms = np.mean([costs[name, seed][i] - specialist[i] for seed in seeds for i in specialist])
    return f"{more_ms:+.2f} ms ({100 * more_ms / np.mean(list(specialist.values())):+.1f} %)"


def _ratios(costs: Mapping[int, float], reference: Mapping[int, float]) -> list[float]:
    """Return the ratio of the costs for each task that both solve."""
    return [costs[i] / reference[i] for i in sorted(costs.keys() & reference.keys())]


def _size(text: str) -> tuple[int, int]:
    num_tables, num_ranks = text.split("x")
    return int(num_tables), int(num_ranks)
