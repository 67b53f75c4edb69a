"""What the comparisons of sharders share: their planners, rows of results, and means over tasks."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from hydra import compose, initialize_config_dir
from scipy.stats import t as student_t

from dlrm_sharded.cli import build_planner
from dlrm_sharded.errors import ConfigError
from dlrm_sharded.planning import Planner

CONF_DIR = str(Path(__file__).resolve().parents[2] / "conf")
REFERENCE = "neuroshard_paper"
TIE = 1e-3
CONFIDENCE = 0.95

SHARDERS_HELP = (
    "yamls of conf/sharder; 'neuroshard,sharder.seed=1' is one with other settings, in quotes"
)


def planner_of(sharder: str, *, device: str = "cpu", hardware: str | None = None) -> Planner:
    """Of the name of a yaml, and of overrides after commas; with the learned cost model."""
    name, *overrides = sharder.split(",")
    with initialize_config_dir(version_base="1.3", config_dir=CONF_DIR):
        cfg = compose("plan", [f"sharder={name}", "cost_model=learned", "task=unused", *overrides])
        return build_planner(cfg, hardware=hardware, device=device, optimizer=None)


def quiet() -> None:
    """Leave out what is said of every plan, such as that the cost model extrapolates."""
    for package in ("dlrm_sharded", "torchrec"):
        logging.getLogger(package).setLevel(logging.ERROR)


class Rows:
    """Results as they come: kept in memory, and where a path is given in a new file of lines."""

    def __init__(self, path: Path | None) -> None:
        self.rows: list[dict[str, Any]] = []
        self._path = path
        if path:
            path.touch(exist_ok=False)

    def add(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        if self._path:
            with self._path.open("a") as file:
                file.write(json.dumps(row) + "\n")


def read_rows(path: Path) -> list[dict[str, Any]]:
    """What `Rows` wrote; a last line that was cut off is left out."""
    return list(_whole_lines(path.read_text()))


def _whole_lines(text: str) -> Iterator[dict[str, Any]]:
    for line in text.splitlines(keepends=True):
        if line.endswith("\n"):
            yield json.loads(line)


Costs = Mapping[str, Mapping[int, float]]
"""By sharder and number of the task; a task without a plan is not there."""


def costs_of(
    rows: Sequence[Mapping[str, Any]], key: str = "cost_ms"
) -> dict[str, dict[int, float]]:
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


def over_best(costs: Costs) -> tuple[int, dict[str, float]]:
    """The tasks that every sharder solves, how many, and the mean cost over the best one's."""
    common = sorted(set.intersection(*(set(of_sharder) for of_sharder in costs.values())))
    table = np.array([[of_sharder[task] for task in common] for of_sharder in costs.values()])
    if not common:
        return 0, dict.fromkeys(costs, np.nan)
    means = (table / table.min(axis=0)).mean(axis=1)
    return len(common), dict(zip(costs, means.tolist(), strict=True))


def reference_of(chosen: str | None, sharders: Sequence[str]) -> str:
    """What the others are compared with: the published search, unless another is chosen."""
    if chosen is not None and chosen not in sharders:
        raise ConfigError(f"--reference is {chosen!r}, must be one of {', '.join(sharders)}")
    return chosen or (REFERENCE if REFERENCE in sharders else sharders[0])


def markdown(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(str(cell) for cell in line)} |" for line in lines)
