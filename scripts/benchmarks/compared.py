"""The parts that comparisons of sharders have in common: options, planners, rows and means."""

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

from dlrm_sharded.accesses.profiles import with_profiles
from dlrm_sharded.commands.hydra_app import CONF_DIR
from dlrm_sharded.commands.planner import build_planner
from dlrm_sharded.files.errors import ConfigError
from dlrm_sharded.files.markdown import markdown_table
from dlrm_sharded.hardware.context import RunContext
from dlrm_sharded.hardware.hardware import Hardware
from dlrm_sharded.plans.plan import ShardingPlan
from dlrm_sharded.plans.plan_cost import PlanCost
from dlrm_sharded.plans.task import ShardingTask
from dlrm_sharded.sharders.planning import Planner
from studies.store import Cases
from studies.study import Case, Row

REFERENCE = "neuroshard_paper"
TIE = 1e-3
CONFIDENCE = 0.95

OTHER_SETTINGS = "'neuroshard,sharder.seed=1' is one with other settings"


def add_sharder_arguments(parser: argparse.ArgumentParser, default: Sequence[str]) -> None:
    """Add the options that name the sharders and the reference they are compared with."""
    parser.add_argument(
        "--sharders",
        nargs="+",
        default=default,
        help=f"sharders: yamls of conf/sharder; {OTHER_SETTINGS}, in quotes",
    )
    parser.add_argument(
        "--reference", help=f"sharder that the others are compared with [{REFERENCE}]"
    )


def add_row_arguments(parser: argparse.ArgumentParser, *, row: str, report: str = "tables") -> None:
    """Add the options that write rows to a file and report on the rows of such a file.

    Args:
        row: the thing that each row is about.
        report: noun for what `--from` prints.
    """
    parser.add_argument("--jsonl", type=Path, help=f"file of rows, one for each {row}; goes on")
    parser.add_argument(
        "--from",
        type=Path,
        dest="from_file",
        help=f"print the {report} of such a file, and run nothing",
    )


def compare(
    options: argparse.Namespace,
    cases: Iterable[Case],
    report: Callable[[Sequence[Row], str | None], None],
) -> None:
    """Report on rows of several sharders; refuse a wrong reference before any row is made."""
    if not options.from_file:
        choose_reference(options.reference, options.sharders)
    report(rows_of(options, cases), options.reference)


def planner_of(sharder: str, *, device: str = "cpu", hardware: Hardware | None = None) -> Planner:
    """Build the planner of a yaml and of overrides after commas, with the learned cost model."""
    name, *overrides = sharder.split(",")
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF_DIR)):
        cfg = compose("plan", [f"sharder={name}", "cost_model=learned", "task=unused", *overrides])
        return build_planner(cfg, RunContext(device=device, hardware=hardware))


def planners_of(
    sharders: Sequence[str], *, device: str, hardware: Hardware | None = None
) -> dict[str, Planner]:
    return {sharder: planner_of(sharder, device=device, hardware=hardware) for sharder in sharders}


def cost_of(planner: Planner, plan: ShardingPlan, task: ShardingTask) -> PlanCost:
    """Return the plan's cost under the planner's cost model, not the sharder's own."""
    assert planner.cost_model is not None
    return planner.cost_model.predict(plan, task)


def on_device(task: ShardingTask, device: str) -> ShardingTask:
    """Return the task on a device, with access profiles, which some sharders would have to make."""
    task = with_profiles(task)
    topology = dataclasses.replace(task.topology, compute_device=device)
    return dataclasses.replace(task, topology=topology)


def quiet() -> None:
    """Silence warnings that come with every plan, such as that the cost model extrapolates."""
    for package in ("dlrm_sharded", "torchrec"):
        logging.getLogger(package).setLevel(logging.ERROR)


def rows_of(options: argparse.Namespace, cases: Iterable[Case]) -> list[Row]:
    """Return the rows of `--from`, or else those of all cases.

    Each case is in `--jsonl` as soon as it ends, and the same command goes on after a killed one.

    Raises:
        ConfigError: `--jsonl` has rows of other settings.
    """
    if options.from_file:
        return list(_read_rows(options.from_file))
    if not options.jsonl:
        return [row for case in cases for row in case.run()]
    store = Cases(options.jsonl, _settings(options), is_strict=True)
    rows: list[Row] = []
    for case in cases:
        ended = store.finished(case.key)
        if ended is None:
            store.add(case.key, case.run(), [])
            ended = store.ended[case.key]
        rows += ended.figures
    return rows


def _settings(options: argparse.Namespace) -> dict[str, Any]:
    """Return the options that rows depend on, as they are read from a file."""
    others = ("jsonl", "from_file", "reference")
    settings = {key: value for key, value in vars(options).items() if key not in others}
    read: dict[str, Any] = json.loads(json.dumps(settings, default=str))
    return read


def _read_rows(path: Path) -> Iterator[Row]:
    """Yield the rows of a file of cases or of rows, but not of a last line that was cut off."""
    for line in path.read_text().splitlines(keepends=True):
        if not line.endswith("\n"):
            continue
        entry = json.loads(line)
        if "figures" in entry:
            yield from entry["figures"]
        elif not entry.keys() & {"conditions", "planned"}:
            yield entry


Costs = Mapping[str, Mapping[int, float]]
"""Costs by sharder and number of the task; tasks without a plan are missing."""


def costs_of(rows: Sequence[Row], key: str = "cost_ms") -> dict[str, dict[int, float]]:
    """Return one figure of every row that has it."""
    costs: dict[str, dict[int, float]] = {}
    for row in rows:
        sharder_costs = costs.setdefault(row["sharder"], {})
        if row.get(key) is not None:
            sharder_costs[row["number"]] = row[key]
    return costs


@dataclass(frozen=True, slots=True)
class Versus:
    """A sharder's cost over another's, on the tasks that both solve.

    Args:
        mean, low, high: mean of the ratio, and its 95 % confidence interval (Student's t).
        wins, ties, losses: tasks that the sharder wins, ties and loses; costs that differ by less
            than `TIE` are a tie.
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
    """Compare the costs of two sharders task by task."""
    both = sorted(costs[sharder].keys() & costs[reference].keys())
    ratios = np.array([costs[sharder][task] / costs[reference][task] for task in both])
    wins, losses = int((ratios < 1 - TIE).sum()), int((ratios > 1 + TIE).sum())
    mean, low, high = mean_with_interval(ratios)
    return Versus(len(ratios), mean, low, high, wins, len(ratios) - wins - losses, losses)


def mean_with_interval(values: Sequence[float] | np.ndarray) -> tuple[float, float, float]:
    """Return the mean and both ends of its confidence interval.

    All are NaN for no values. The interval is infinite for one value.
    """
    num = len(values)
    if num < 2:
        mean = float(values[0]) if num else np.nan
        return mean, -np.inf if num else np.nan, np.inf if num else np.nan
    mean = float(np.mean(values))
    error = float(np.std(values, ddof=1)) / num**0.5
    half = error * float(student_t.ppf((1 + CONFIDENCE) / 2, num - 1))
    return mean, mean - half, mean + half


def interval_text(values: Sequence[float] | np.ndarray, spec: str) -> str:
    """Write the mean and its interval, each in the format `spec`."""
    mean, low, high = mean_with_interval(values)
    return f"{mean:{spec}} [{low:{spec}}, {high:{spec}}]"


def over_best(costs: Costs) -> tuple[int, dict[str, float]]:
    """Return the number of tasks that all sharders solve, and there each mean ratio to the best."""
    common = sorted(set.intersection(*(set(by_task) for by_task in costs.values())))
    table = np.array([[by_task[task] for task in common] for by_task in costs.values()])
    if not common:
        return 0, dict.fromkeys(costs, np.nan)
    means = (table / table.min(axis=0)).mean(axis=1)
    return len(common), dict(zip(costs, means.tolist(), strict=True))


def sharders_of(rows: Sequence[Row], reference: str | None) -> tuple[list[str], str]:
    """Return the sharders that have rows, and the reference among them."""
    sharders = list(dict.fromkeys(row["sharder"] for row in rows))
    return sharders, choose_reference(reference, sharders)


def choose_reference(chosen: str | None, sharders: Sequence[str]) -> str:
    """Return the sharder that the others are compared with: by default, the published search."""
    if chosen is not None and chosen not in sharders:
        raise ConfigError(f"--reference is {chosen!r}, must be one of {', '.join(sharders)}")
    return chosen or (REFERENCE if REFERENCE in sharders else sharders[0])


def markdown(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a table as one text."""
    return "\n".join(markdown_table(header, rows))
