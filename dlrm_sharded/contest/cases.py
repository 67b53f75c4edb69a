"""Cases in processes of their own, whose entries a folder keeps as they come.

`cases.jsonl` has a line for each case that has ended, under the case's key, and
`plans/TASK/SHARDER.json` its plan. The same command goes on with what is missing or has changed.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlrm_sharded.contest.entry import Case, Entry, Outcome, digest, solve
from dlrm_sharded.files.errors import ConfigError, DataError
from dlrm_sharded.files.json_files import write_json
from dlrm_sharded.files.json_forms import read_form
from dlrm_sharded.files.line_file import LineFile
from dlrm_sharded.ranks.workers import Refusal, in_processes

CASES, PLANS = "cases.jsonl", "plans"

log = logging.getLogger("dlrm_sharded.compare")


@dataclass(frozen=True, slots=True)
class Setting:
    """How a comparison is made and written.

    Args:
        margin: relative difference of predicted costs below which they are a tie.
        prices: where the costs come from, for the summary.
        file_format: of the tables, csv or parquet.
    """

    out: Path
    reference: str
    margin: float
    num_workers: int
    limit_s: float
    prices: str
    file_format: str


def plan_path(out: Path, task: str, sharder: str) -> Path:
    """Return the path of the plan of a case; names that differ have different paths."""
    return out / PLANS / _file_name(task) / f"{_file_name(sharder)}.json"


def run_cases(cases: Sequence[Case], out: Path, *, limit_s: float, num_workers: int) -> list[Entry]:
    """Return the entries of all cases, in their order, and say which of them the folder had.

    A case without a plan is taken over, unless it had less time than it would have now.

    Args:
        limit_s: time of a case.
        num_workers: number of cases at once.

    Raises:
        ConfigError: the folder cannot be written.
    """
    file, begun = LineFile(out / CASES, "case"), time.monotonic()
    by_key = {case.key(): case for case in cases}
    try:
        kept = dict(file.read(_kept).values())
    except OSError as error:
        raise ConfigError(f"cannot read {file.path}: {error.strerror}") from error
    found = {
        key: kept[key]
        for key, case in by_key.items()
        if key in kept and _is_usable(case, kept[key], out, limit_s)
    }
    missing = [key for key in by_key if key not in found]
    if found:
        log.info("%d of %d cases are taken over from %s", len(found), len(cases), out)

    def done(index: int, result: tuple[Outcome, dict[str, Any]] | Refusal) -> None:
        key, case = missing[index], by_key[missing[index]]
        if isinstance(result, Refusal):
            outcome = Outcome(result.seconds, limit_s, result.message, result.is_infeasible)
        else:
            outcome, plan = result
            path = plan_path(out, case.task_name, case.sharder)
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, plan)
        file.append({"key": key, "outcome": dataclasses.asdict(outcome)})
        found[key] = outcome
        cost = outcome.cost
        text = f"no plan: {outcome.error}" if cost is None else f"{cost.cost_ms:.2f} ms"
        name = f"{case.task_name}, {case.sharder}: {text}"
        log.info("%d of %d: %s, in %.1f s", len(found), len(cases), name, outcome.solve_s)

    try:
        in_processes(
            [functools.partial(solve, by_key[key], limit_s=limit_s) for key in missing],
            limit_s=limit_s,
            num_workers=num_workers,
            done=done,
        )
    except OSError as error:
        raise ConfigError(f"cannot write in out = {out}: {error.strerror}") from error
    except KeyboardInterrupt:
        log.info("interrupted; the same command goes on from %d cases in %s", len(found), out)
        raise
    log.info("%d cases planned in %.0f s", len(missing), time.monotonic() - begun)
    return [Entry(case, found[key]) for key, case in by_key.items()]


def _file_name(name: str) -> str:
    safe = re.sub(r"[^\w.=,;-]+", "_", name)
    return safe if safe == name else f"{safe}-{digest(name)[:6]}"


def _kept(fields: Mapping[str, Any]) -> tuple[str, Outcome]:
    if "outcome" not in fields:
        raise DataError("it is of an earlier version")
    return str(fields["key"]), read_form(fields["outcome"], Outcome, name="an outcome")


def _is_usable(case: Case, outcome: Outcome, out: Path, limit_s: float) -> bool:
    if outcome.error is not None:
        return outcome.limit_s >= limit_s
    return plan_path(out, case.task_name, case.sharder).exists()
