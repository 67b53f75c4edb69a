"""Finds the runs in some folders, including jobs of sweeps that left no folder."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlrm_sharded.files.errors import ConfigError, DataError
from dlrm_sharded.files.json_files import read_json_object
from dlrm_sharded.runs.result import read_result
from dlrm_sharded.runs.run_folder import SKIPPED, Run, read_run


@dataclass(frozen=True, slots=True)
class FoundRuns:
    """Runs in order of their paths, and messages about files that could not be read."""

    runs: tuple[Run, ...]
    problems: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Job:
    """A job of a sweep, as its sweep.json describes it."""

    sweep: Path
    fields: Mapping[str, Any]


def find_runs(folders: Sequence[Path]) -> FoundRuns:
    """Return each run in some folders once; a folder is a run, a sweep, or a tree of them.

    Raises:
        DataError: a folder does not exist, or none holds a run.
    """
    searched = [folder.resolve() for folder in folders]
    for folder in searched:
        if not folder.is_dir():
            raise DataError(f"{folder} is not a folder; give a run, a sweep, or a folder of them")
    jobs: dict[Path, _Job] = {}
    run_folders: set[Path] = set()
    problems: list[str] = []
    for folder in searched:
        inside = list(_walk(folder))
        run_folders |= {path for path in inside if _is_run(path)}
        for sweep in [*folder.parents, *inside]:
            try:
                jobs |= _jobs(sweep)
            except DataError as error:
                problems.append(str(error))
        run_folders |= {path for path in jobs if path.is_relative_to(folder)}
    if not run_folders:
        names = ", ".join(str(folder) for folder in searched)
        raise DataError(
            f"no runs in {names}: looked for result.json, .hydra/overrides.yaml and sweep.json "
            "in every folder there; give a run, a sweep, or a folder of them"
        )
    root = Path(os.path.commonpath(searched))
    unlisted = {path: _Job(path.parent, {}) for path in run_folders}
    runs = [
        read_run(path, root=root, sweep=job.sweep, job=job.fields)
        for path, job in sorted((unlisted | jobs).items())
        if path in run_folders
    ]
    if all(run.state == SKIPPED for run in runs):
        raise DataError(f"all {len(runs)} runs in {root} were skipped: {runs[0].reason}")
    problems += [f"{run.name}: {SKIPPED}: {run.reason}" for run in runs if run.state == SKIPPED]
    originals: dict[tuple[bytes, ...], Run] = {}
    for run in runs:
        original = originals.setdefault(_contents(run.folder), run)
        if original is not run:
            problems.append(f"{run.name}: not counted, as it is a copy of {original.name}")
    counted = (run for run in originals.values() if run.state != SKIPPED)
    return FoundRuns(tuple(counted), tuple(dict.fromkeys(problems)))


def _walk(folder: Path) -> Iterator[Path]:
    for path, below, _ in os.walk(folder):
        below[:] = [name for name in below if not name.startswith(".")]
        yield Path(path)


def _contents(folder: Path) -> tuple[bytes, ...]:
    """Return what only a copy of the folder has, too: Hydra's files name the folder of a run."""
    paths = [folder / ".hydra" / "hydra.yaml", folder / "result.json"]
    if not all(path.is_file() for path in paths):
        return (str(folder).encode(),)
    return tuple(path.read_bytes() for path in paths)


def _is_run(folder: Path) -> bool:
    if (folder / ".hydra" / "overrides.yaml").is_file():
        return True
    try:
        result = read_result(folder)
    except DataError:
        return True
    return result is not None and result.has_metrics  # else another tool's file


def _jobs(sweep: Path) -> dict[Path, _Job]:
    """Return the jobs of a folder's sweep.json, if it has one, by their own folders."""
    path = sweep / "sweep.json"
    if not path.is_file():
        return {}
    try:
        jobs = read_json_object(path, noun="sweep").get("jobs")
    except ConfigError as error:
        raise DataError(f"{error}; its jobs that left no folder are not counted") from error
    if not isinstance(jobs, list):
        raise DataError(f"{path} has no list of jobs; those that left no folder are not counted")
    return {
        (sweep / job["folder"]).resolve(): _Job(sweep, job)
        for job in jobs
        if isinstance(job, dict) and isinstance(job.get("folder"), str)
    }
