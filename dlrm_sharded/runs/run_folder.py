"""Reads one run from disk: its figures if it succeeded, or the reason for its failure."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from dlrm_sharded.files.errors import DataError
from dlrm_sharded.files.limited import Finite, Text
from dlrm_sharded.files.renamed import RENAMED
from dlrm_sharded.runs.result import (
    Platform,
    RunResult,
    Setting,
    known,
    read_result,
)

SUCCEEDED = "succeeded"
SKIPPED = "skipped"
"""State of a job that a sweep left out on purpose."""

FINAL_STATES = (SKIPPED, "failed", "cancelled", "preempted", "not_started")
"""States that stand even where there is a result.json: a rank may fail after it was written."""

NAMES_OF_02 = {"neuroshard": "search (0.2)", "neuroshard_paper": "neuroshard (0.2)"}
"""Names of runs of release 0.2 whose sharder is named otherwise since."""

LOG_TAIL_BYTES = 65536
"""Number of bytes at the end of a log that are searched for an error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run, whether it succeeded or not.

    Args:
        name: path below the folder that holds all that are compared.
        sweep: folder of the runs that were started together.
        sharder: its name; that of a run of 0.2 says so where it means another one since.
        costs: name of the costs that the sharder planned by; None for none, or if not known.
        options: overrides of the sharder's own arguments.
        setting: all other overrides, but for the seed.
        platform: None if it is not known.
        result: None if the run did not succeed.
    """

    name: str
    folder: Path
    sweep: Path
    sharder: str
    costs: str | None = None
    options: Setting
    setting: Setting
    seed: int | None
    state: str
    reason: str | None
    log: str | None
    seconds: float | None
    platform: Platform | None
    result: RunResult | None

    @property
    def succeeded(self) -> bool:
        return self.result is not None


def read_run(folder: Path, *, root: Path, sweep: Path, job: Mapping[str, Any]) -> Run:
    """Return the run of a folder, or of `job`, its entry in sweep.json, if it left no folder."""
    state, reason = known(job.get("state"), Text), known(job.get("reason"), Text)
    log = _log(folder, sweep, job)
    result = None
    try:
        result = read_result(folder)
        unreadable = None if result is None or result.has_metrics else "result.json has no figures"
    except DataError as error:
        unreadable = str(error)
    if state not in FINAL_STATES:
        if unreadable is not None:
            state, reason = "unreadable", unreadable
        elif result is not None:
            state, reason = SUCCEEDED, None
        elif state in (None, SUCCEEDED):
            state = "unfinished" if state is None else "without result.json"
            reason = reason or _last_error(log, sweep)
    overrides = _overrides(folder, job)
    known_overrides = overrides or {}
    return Run(
        name=_below(folder, root),
        folder=folder,
        sweep=sweep,
        sharder=_sharder(folder, job, known_overrides, result),
        costs=None if result is None else result.costs,
        options=_options(known_overrides),
        setting=_unknown_setting(result) if overrides is None else _setting(known_overrides),
        seed=_seed(known_overrides, result),
        state=str(state),
        reason=reason,
        log=None if log is None else _below(log, root),
        seconds=known(job.get("seconds"), Finite),
        platform=None if result is None else result.platform,
        result=result if state == SUCCEEDED else None,
    )


def _overrides(folder: Path, job: Mapping[str, Any]) -> dict[str, str] | None:
    """Return the overrides by key, without Hydra's own; None where they are not known."""
    lines = job.get("overrides")
    if not isinstance(lines, list):
        lines = _read_yaml(folder / ".hydra" / "overrides.yaml")
    if not isinstance(lines, list):
        return None
    pairs = (str(line).lstrip("+").partition("=") for line in lines)
    return {
        key: _spelled(value) for key, _, value in pairs if not key.startswith(("hydra.", "hydra/"))
    }


def _spelled(value: str) -> str:
    """Return a value as sweepers spell it: False for false, 0.001 for 1e-3, [1,2] for [1, 2]."""
    if value[:1] in ("'", '"'):
        return value
    parts = re.split(r"\s*([\[\]{},:])\s*", value.strip())
    return "".join(map(_spelled_part, parts))


def _spelled_part(text: str) -> str:
    if text.lower() in ("true", "false"):
        return text.capitalize()
    if re.fullmatch(r"[+-]?(?!0\d)[\d_.]+(e[+-]?\d+)?", text, re.IGNORECASE):
        for read in (int, float):
            with contextlib.suppress(ValueError):
                return str(read(text))
    return "null" if text.lower() == "null" else text


def _options(overrides: Mapping[str, str]) -> Setting:
    return tuple(
        sorted(
            (key.removeprefix("sharder."), value)
            for key, value in overrides.items()
            if key.startswith("sharder.") and key != "sharder._target_"
        )
    )


def _setting(overrides: Mapping[str, str]) -> Setting:
    return tuple(
        sorted(
            (key, value)
            for key, value in overrides.items()
            if key not in ("sharder", "seed") and not key.startswith("sharder.")
        )
    )


def _unknown_setting(result: RunResult | None) -> Setting:
    """Return a setting that no run with known overrides has."""
    size = None if result is None else result.batch_size
    return (("batch_size", str(size or "unknown")), ("overrides", "unknown"))


def _sharder(
    folder: Path, job: Mapping[str, Any], overrides: Mapping[str, str], result: RunResult | None
) -> str:
    """Return the sharder as it was chosen: runs with and without a result get the same name."""
    if target := overrides.get("sharder._target_"):
        return target
    choices = job.get("choices")
    chosen = (
        known(choices.get("sharder") if isinstance(choices, dict) else None, Text)
        or overrides.get("sharder")
        or _default_sharder(folder)
        or (result.sharder if result is not None else None)
        or "unknown"
    )
    return NAMES_OF_02.get(chosen, chosen) if _is_of_02(folder, result) else chosen


def _is_of_02(folder: Path, result: RunResult | None) -> bool:
    """Return whether release 0.2 wrote a run, in whose names `neuroshard` is our search."""
    config = _read_yaml(folder / ".hydra" / "config.yaml")
    node = config.get("sharder") if isinstance(config, dict) else None
    if isinstance(node, dict) and (target := node.get("_target_")) is not None:
        return target in RENAMED
    return result is not None and result.costs is None


def _default_sharder(folder: Path) -> str | None:
    fields: Any = _read_yaml(folder / ".hydra" / "hydra.yaml")
    for key in ("hydra", "runtime", "choices", "sharder"):
        fields = fields.get(key) if isinstance(fields, dict) else None
    return known(fields, Text)


def _seed(overrides: Mapping[str, str], result: RunResult | None) -> int | None:
    if result is not None and result.seed is not None:
        return result.seed
    text = overrides.get("seed", "")
    return int(text) if text.isdecimal() else None


def _log(folder: Path, sweep: Path, job: Mapping[str, Any]) -> Path | None:
    named = known(job.get("log"), Text)
    log = folder / "train.log" if named is None else sweep / named
    return log if named is not None or log.is_file() else None


def _last_error(log: Path | None, sweep: Path) -> str | None:
    """Return the last error of a log, without its time, if the log is in the sweep's folder."""
    if log is None or not log.is_file() or not log.resolve().is_relative_to(sweep.resolve()):
        return None
    try:
        with log.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - LOG_TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return None
    messages = [line.partition("] ")[2] for line in lines]
    return next((text for text in reversed(messages) if text.startswith("error")), None)


def _read_yaml(path: Path) -> Any:
    """Return the content; None where there is no such file, or it is not YAML."""
    if not path.is_file():
        return None
    try:
        return yaml.load(
            path.read_text(encoding="utf-8"), getattr(yaml, "CSafeLoader", yaml.SafeLoader)
        )
    except (OSError, ValueError, yaml.YAMLError):
        return None


def _below(path: Path, root: Path) -> str:
    if path == root:
        return path.name
    return str(path.relative_to(root) if path.is_relative_to(root) else path)
