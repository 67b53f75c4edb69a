"""What the comparisons of sharders share: options, planners, rows of results, means over tasks."""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from hydra import compose, initialize_config_dir
from scipy.stats import t as student_t

from dlrm_sharded.commands.hydra_app import CONF_DIR
from dlrm_sharded.commands.planner import build_planner
from dlrm_sharded.context import RunContext
from dlrm_sharded.errors import ConfigError
from dlrm_sharded.markdown import markdown_table
from dlrm_sharded.plan import ShardingPlan
from dlrm_sharded.plan_cost import PlanCost
from dlrm_sharded.planning import Planner
from dlrm_sharded.profiles import with_profiles
from dlrm_sharded.task import ShardingTask

REFERENCE = "neuroshard_paper"
TIE = 1e-3
CONFIDENCE = 0.95

OTHER_SETTINGS = "'neuroshard,sharder.seed=1' is one with other settings"

Row = dict[str, Any]
"""A line of `--jsonl`: where sharders are compared, of a `sharder` on the task of a `number`."""


def add_sharder_arguments(parser: argparse.ArgumentParser, default: Sequence[str]) -> None:
    """Who is compared, and with whom."""
    parser.add_argument(
        "--sharders",
        nargs="+",
        default=default,
        help=f"yamls of conf/sharder; {OTHER_SETTINGS}, in quotes",
    )
    parser.add_argument("--reference", help=f"to compare the others with [{REFERENCE}]")


def add_row_arguments(parser: argparse.ArgumentParser, *, row: str, report: str = "tables") -> None:
    """Where rows are kept, what each is for, and what is shown of them."""
    parser.add_argument("--jsonl", type=Path, help=f"new file, a line for each {row}")
    parser.add_argument(
        "--from", type=Path, dest="from_file", help=f"{report} of such a file, nothing is run"
    )


def compare(
    options: argparse.Namespace,
    rows: Iterable[Row],
    report: Callable[[Sequence[Row], str | None], None],
) -> None:
    """Report on rows of several sharders; a wrong reference is refused before there are any."""
    if not options.from_file:
        reference_of(options.reference, options.sharders)
    report(rows_of(options, rows), options.reference)


def planner_of(sharder: str, *, device: str = "cpu", hardware: str | None = None) -> Planner:
    """Of the name of a yaml, and of overrides after commas; with the learned cost model."""
    name, *overrides = sharder.split(",")
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF_DIR)):
        cfg = compose("plan", [f"sharder={name}", "cost_model=learned", "task=unused", *overrides])
        return build_planner(cfg, RunContext(device=device, hardware=hardware))


def planners_of(
    sharders: Sequence[str], *, device: str, hardware: str | None = None
) -> dict[str, Planner]:
    return {sharder: planner_of(sharder, device=device, hardware=hardware) for sharder in sharders}


def cost_of(planner: Planner, plan: ShardingPlan, task: ShardingTask) -> PlanCost:
    """Under the planner's cost model, whatever the sharder predicts."""
    assert planner.cost_model is not None
    return planner.cost_model.predict(plan, task)


def on_device(task: ShardingTask, device: str) -> ShardingTask:
    """With access profiles too, which would else be part of some sharders' time."""
    task = with_profiles(task)
    topology = dataclasses.replace(task.topology, compute_device=device)
    return dataclasses.replace(task, topology=topology)


def quiet() -> None:
    """Leave out what is said of every plan, such as that the cost model extrapolates."""
    for package in ("dlrm_sharded", "torchrec"):
        logging.getLogger(package).setLevel(logging.ERROR)


def rows_of(options: argparse.Namespace, new: Iterable[Row]) -> list[Row]:
    """Those of `--from`; else new ones, each a line of `--jsonl` as soon as it is there."""
    if options.from_file:
        return list(_whole_lines(options.from_file.read_text()))
    if options.jsonl:
        options.jsonl.touch(exist_ok=False)
    rows = []
    for row in new:
        rows.append(row)
        if options.jsonl:
            with options.jsonl.open("a") as file:
                file.write(json.dumps(row) + "\n")
    return rows


def _whole_lines(text: str) -> Iterator[Row]:
    """Without a last line that was cut off."""
    for line in text.splitlines(keepends=True):
        if line.endswith("\n"):
            yield json.loads(line)


Costs = Mapping[str, Mapping[int, float]]
"""By sharder and number of the task; a task without a plan is not there."""


def costs_of(rows: Sequence[Row], key: str = "cost_ms") -> dict[str, dict[int, float]]:
    """One figure of every row that has it."""
    costs: dict[str, dict[int, float]] = {}
    for row in rows:
        of_sharder = costs.setdefault(row["sharder"], {})
        if row.get(key) is not None:
            of_sharder[row["number"]] = row[key]
    return costs


@dataclass(frozen=True, slots=True)
class Versus:
    """A sharder's cost over another's, on the tasks that both solve.

    Args:
        mean, low, high: of the ratio, with its 95 % confidence interval (Student's t).
        wins, ties, losses: of the sharder; a tie is less than `TIE` apart.
    """

    num: int
    mean: float
    low: float
    high: float
    wins: int
    ties: int
    losses: int

    def __str__(self) -> str:
        if self.num < 2:
            return f"{self.mean:.4f}" if self.num else "-"
        return f"{self.mean:.4f} [{self.low:.4f}, {self.high:.4f}]"

    @property
    def score(self) -> str:
        return f"{self.wins}/{self.ties}/{self.losses}"


def versus(costs: Costs, sharder: str, reference: str) -> Versus:
    """Task by task."""
    both = sorted(costs[sharder].keys() & costs[reference].keys())
    ratios = np.array([costs[sharder][task] / costs[reference][task] for task in both])
    wins, losses = int((ratios < 1 - TIE).sum()), int((ratios > 1 + TIE).sum())
    mean, low, high = mean_with_interval(ratios)
    return Versus(len(ratios), mean, low, high, wins, len(ratios) - wins - losses, losses)


def mean_with_interval(values: Sequence[float] | np.ndarray) -> tuple[float, float, float]:
    """Mean, and both ends of its confidence interval: NaN of nothing, infinite of one value."""
    num = len(values)
    if num < 2:
        mean = float(values[0]) if num else np.nan
        return mean, -np.inf if num else np.nan, np.inf if num else np.nan
    mean = float(np.mean(values))
    error = float(np.std(values, ddof=1)) / num**0.5
    half = error * float(student_t.ppf((1 + CONFIDENCE) / 2, num - 1))
    return mean, mean - half, mean + half


def interval_text(values: Sequence[float] | np.ndarray, spec: str) -> str:
    """Mean and interval, each in the format."""
    mean, low, high = mean_with_interval(values)
    return f"{mean:{spec}} [{low:{spec}}, {high:{spec}}]"


def over_best(costs: Costs) -> tuple[int, dict[str, float]]:
    """The tasks that every sharder solves, how many, and the mean cost over the best one's."""
    common = sorted(set.intersection(*(set(of_sharder) for of_sharder in costs.values())))
    table = np.array([[of_sharder[task] for task in common] for of_sharder in costs.values()])
    if not common:
        return 0, dict.fromkeys(costs, np.nan)
    means = (table / table.min(axis=0)).mean(axis=1)
    return len(common), dict(zip(costs, means.tolist(), strict=True))


def sharders_of(rows: Sequence[Row], reference: str | None) -> tuple[list[str], str]:
    """All that have rows, and the one that they are compared with."""
    sharders = list(dict.fromkeys(row["sharder"] for row in rows))
    return sharders, reference_of(reference, sharders)


def reference_of(chosen: str | None, sharders: Sequence[str]) -> str:
    """What the others are compared with: the published search, unless another is chosen."""
    if chosen is not None and chosen not in sharders:
        raise ConfigError(f"--reference is {chosen!r}, must be one of {', '.join(sharders)}")
    return chosen or (REFERENCE if REFERENCE in sharders else sharders[0])


def markdown(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a table as one text."""
    return "\n".join(markdown_table(header, rows))
