"""Cases in processes of their own, whose entries a folder keeps as they come.

`cases.jsonl` has a line for each case that has ended, under the case's key, and
`plans/TASK/SHARDER.json` its plan. The same command goes on with what is missing or has changed.
"""

from __future__ import annotations

import functools
import logging
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dlrm_sharded.contest.entry import Case, Entry, digest, no_plan, solve
from dlrm_sharded.files.errors import ConfigError
from dlrm_sharded.files.json_files import write_json
from dlrm_sharded.files.line_file import LineFile
from dlrm_sharded.ranks.workers import Refusal, in_processes

CASES, PLANS = "cases.jsonl", "plans"

log = logging.getLogger("dlrm_sharded.compare")


def plan_path(out: Path, task: str, sharder: str) -> Path:
    """Return the path of the plan of a case; names that differ have different paths."""
    return out / PLANS / _file_name(task) / f"{_file_name(sharder)}.json"


def run_cases(cases: Sequence[Case], out: Path, *, limit_s: float, num_workers: int) -> list[Entry]:
    """Return the entries of all cases, in their order, and say which of them the folder had.

    An entry without a plan is taken over, unless it had less time than it would have now.

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
        key: kept[key] for key in by_key if key in kept and _is_usable(kept[key], out, limit_s)
    }
    missing = [key for key in by_key if key not in found]
    if found:
        log.info("%d of %d cases are taken over from %s", len(found), len(cases), out)

    def done(index: int, result: tuple[Entry, dict[str, Any]] | Refusal) -> None:
        key, case = missing[index], by_key[missing[index]]
        if isinstance(result, Refusal):
            entry = no_plan(case, result, limit_s=limit_s)
        else:
            entry, plan = result
            path = plan_path(out, entry.task, entry.sharder)
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, plan)
        file.append({"key": key, "entry": entry.to_json()})
        found[key] = entry
        cost = f"no plan: {entry.error}" if entry.cost is None else f"{entry.cost.cost_ms:.2f} ms"
        name = f"{entry.task}, {entry.sharder}: {cost}"
        log.info("%d of %d: %s, in %.1f s", len(found), len(cases), name, entry.solve_s)

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
    return [found[key] for key in by_key]


def _file_name(name: str) -> str:
    safe = re.sub(r"[^\w.=,;-]+", "_", name)
    return safe if safe == name else f"{safe}-{digest(name)[:6]}"


def _kept(fields: Mapping[str, Any]) -> tuple[str, Entry]:
    return str(fields["key"]), Entry.from_json(fields["entry"])


def _is_usable(entry: Entry, out: Path, limit_s: float) -> bool:
    if entry.error is not None:
        return entry.limit_s >= limit_s
    return plan_path(out, entry.task, entry.sharder).exists()
