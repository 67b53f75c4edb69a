"""Finds the runs in folders, and reads their figures, or the reasons why they failed.

Jobs of sweeps that left no folder are found, too.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from dlrm_sharded.files.errors import ConfigError, DataError
from dlrm_sharded.files.json_files import read_json_object
from dlrm_sharded.files.json_forms import read_form
from dlrm_sharded.runs.result import FILE_NAME, RunResult, read_result, setting_text

OVERRIDES = ".hydra/overrides.yaml"
SUCCEEDED = "succeeded"
FINAL_STATES = ("failed", "cancelled", "preempted", "not_started")
"""States that count even if there is a result.json: a rank may fail after it was written."""

NAMES_OF_02 = {"neuroshard": "search (0.2)", "neuroshard_paper": "neuroshard (0.2)"}
"""Names for runs of release 0.2 whose sharders have been renamed since. Its results do not have the
key `costs`, but those of today's sharders with these names do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A job of a sweep, as sweep.json describes it."""

    folder: str
    overrides: tuple[str, ...] | None = None
    choices: Mapping[str, Any] = field(default_factory=dict)
    state: str | None = None
    reason: str | None = None
    log: str | None = None
    seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run, whether it succeeded or not.

    Args:
        name: path relative to the common folder of all compared runs.
        sweep: folder of the runs that were started together.
        sharder: name of the sharder; for a run of 0.2 it is marked if it now means another sharder.
        options: overrides of the sharder's arguments, as on the command line.
        setting: all other overrides, except the seed.
        result: None if the run did not succeed.
    """

    name: str
    folder: Path
    sweep: Path
    sharder: str
    options: str
    setting: str
    seed: int | None
    state: str
    reason: str | None
    log: str | None
    seconds: float | None
    result: RunResult | None


def find_runs(folders: Sequence[Path]) -> tuple[list[Run], list[str]]:
    """Return each run in folders once, ordered by path, and messages about unreadable files.

    A folder is a run, a sweep, or a tree of them.

    Raises:
        DataError: a folder does not exist, or none holds a run.
    """
    searched = [folder.resolve() for folder in folders]
    found: dict[Path, tuple[Path, Job]] = {}
    problems: list[str] = []
    for folder in searched:
        if not folder.is_dir():
            raise DataError(f"{folder} is not a folder; give a run, a sweep, or a folder of them")
        inside = list(_walk(folder))
        found |= {path: (path.parent, Job(folder=path.name)) for path in inside if _is_run(path)}
        for sweep in [*folder.parents, *inside]:
            try:
                jobs = {(sweep / job.folder).resolve(): job for job in _jobs(sweep)}
            except (ConfigError, DataError) as error:
                problems.append(f"{error}; its jobs that left no folder are not counted")
                continue
            found |= {
                path: (sweep, job) for path, job in jobs.items() if path.is_relative_to(folder)
            }
    if not found:
        raise DataError(
            f"no runs in {', '.join(map(str, searched))}: looked for result.json, "
            "plan.json and sweep.json there; give a run, a sweep, or a folder of them"
        )
    root = Path(os.path.commonpath(searched))
    runs = [
        read_run(path, root=root, sweep=sweep, job=job)
        for path, (sweep, job) in sorted(found.items(), key=lambda item: item[0])
    ]
    return runs, list(dict.fromkeys(problems))


def _walk(folder: Path) -> Iterator[Path]:
    for path, below, _ in os.walk(folder):
        below[:] = [name for name in below if not name.startswith(".")]
        yield Path(path)


def _is_run(folder: Path) -> bool:
    """Return whether a run wrote its plan or its result here; other starts were refused."""
    has_plan = (folder / OVERRIDES).is_file() and (folder / "plan.json").is_file()
    return has_plan or (folder / FILE_NAME).is_file()


def _jobs(sweep: Path) -> tuple[Job, ...]:
    """Return the jobs of a folder's sweep.json, if it has one.

    Raises:
        ConfigError, DataError: the file cannot be read, or is malformed.
    """
    path = sweep / "sweep.json"
    if not path.is_file():
        return ()
    jobs = read_json_object(path, noun="sweep").get("jobs")
    return read_form(jobs, tuple[Job, ...], name=str(path), may_have_others=True)


def read_run(folder: Path, *, root: Path, sweep: Path, job: Job) -> Run:
    """Return the run in a folder, or the job's run in sweep.json if it left no folder."""
    log = folder / "train.log" if job.log is None else sweep / job.log
    result, unreadable = None, None
    try:
        result = read_result(folder)
        if result is not None and not set(result.metrics.values()) - {None}:
            unreadable = "result.json has no figures"
    except ConfigError as error:
        unreadable = str(error)
    state, reason = job.state, job.reason
    if state not in FINAL_STATES:
        if unreadable is not None:
            state, reason = "unreadable", unreadable
        elif result is not None:
            state, reason = SUCCEEDED, None
        elif state in (None, SUCCEEDED):
            state = "unfinished" if state is None else "without result.json"
    overrides = _overrides(folder, job)
    known = {"overrides": "unknown"} if overrides is None else overrides  # no other run has this
    own = {key: value for key, value in known.items() if key.startswith("sharder.")}
    others = {key: known[key] for key in known if key not in {"sharder", "seed", *own}}
    target = own.pop("sharder._target_", None)
    seed = known.get("seed", "")
    if result is not None and result.seed is not None:
        seed = str(result.seed)
    return Run(
        name=os.path.relpath(folder, root.parent if folder == root else root),
        folder=folder,
        sweep=sweep,
        sharder=target or _sharder(folder, job, known, result),
        options=setting_text({key.removeprefix("sharder."): own[key] for key in own}),
        setting=setting_text(others),
        seed=int(seed) if seed.isdecimal() else None,
        state=str(state),
        reason=reason,
        log=os.path.relpath(log, root) if log.is_file() else None,
        seconds=job.seconds,
        result=result if state == SUCCEEDED else None,
    )


def _overrides(folder: Path, job: Job) -> dict[str, str] | None:
    """Return the overrides by key, without Hydra's own; None if they are unknown."""
    lines = job.overrides or _read_yaml(folder / OVERRIDES)
    if not isinstance(lines, list | tuple):
        return None
    pairs = (str(line).lstrip("+").partition("=") for line in lines)
    return {
        key: _spelled(value) for key, _, value in pairs if not key.startswith(("hydra.", "hydra/"))
    }


def _spelled(text: str) -> str:
    """Return a uniform spelling of a value: sweepers write False for false, and 0.001 for 1e-3."""
    for read in (int, float, yaml.safe_load):
        with contextlib.suppress(ValueError, yaml.YAMLError):
            return str(read(text)).replace(" ", "")
    return text


def _sharder(folder: Path, job: Job, overrides: Mapping[str, str], result: RunResult | None) -> str:
    """Return the sharder's name in the config, so that runs with and without a result agree."""
    fields: Any = _read_yaml(folder / ".hydra" / "hydra.yaml")
    for key in ("hydra", "runtime", "choices", "sharder"):
        fields = fields.get(key) if isinstance(fields, dict) else None
    of_result = None if result is None else result.sharder
    chosen = job.choices.get("sharder") or overrides.get("sharder") or fields or of_result
    is_of_02 = result is not None and result.costs is None
    return NAMES_OF_02.get(str(chosen), str(chosen)) if is_of_02 else str(chosen or "unknown")


def _read_yaml(path: Path) -> Any:
    """Return the content of a file; None if it does not exist or is not YAML."""
    with contextlib.suppress(OSError, ValueError, yaml.YAMLError):
        if path.is_file():
            loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
            # either loader makes only plain values
            return yaml.load(path.read_text(encoding="utf-8"), loader)
    return None
