"""The journal of an unfinished collection, to which every sample is appended when it is measured.

A collection that is killed loses no sample. The folder `<out>.partial` holds `samples.jsonl` and
`settings.json`; a resumed collection must have the same settings.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from dlrm_sharded.calibration.costs_file import manifest_path
from dlrm_sharded.calibration.samples import Sample, problem_of
from dlrm_sharded.files.errors import ConfigError, DataError, UserError
from dlrm_sharded.files.json_files import read_json_object, write_json
from dlrm_sharded.files.line_file import DAMAGED


class Journal:
    """The folder beside `out`, locked until `close` or the end of the process.

    Args:
        settings: settings and hardware of the collection; JSON.

    Raises:
        ConfigError: `out` exists, or has the name of its manifest, or another process has locked
            the folder.
        DataError: the folder belongs to a collection with other settings.
    """

    def __init__(self, out: Path, settings: Mapping[str, Any]) -> None:
        if out == manifest_path(out):
            raise ConfigError(
                f"out is {out}, where the manifest goes; give the data another name, such as "
                f"{out.with_suffix('.parquet')}"
            )
        self.folder = out.with_name(f"{out.name}.partial")
        self._samples = self.folder / "samples.jsonl"
        settings_path = self.folder / "settings.json"
        # a kill may have left the data without its manifest; the journal still has all samples
        if manifest_path(out).exists() or (out.exists() and not settings_path.exists()):
            raise ConfigError(f"{out} exists already; give another out=, or remove it")
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = self._locked()
        if not settings_path.exists():
            self._samples.write_bytes(b"")
        if self._samples.stat().st_size == 0:
            write_json(settings_path, settings)
            return
        try:
            self._check(read_json_object(settings_path, noun="settings"), settings)
        except UserError:
            self.close()
            raise

    def append(self, sample: Sample) -> None:
        """Write a sample at the end of the file.

        Raises:
            DataError: it cannot have been measured.
        """
        problem = problem_of(sample)
        if problem is not None:
            raise DataError(
                f"{sample.kind} plan {sample.number} cannot have been measured right: {problem}; "
                f"start again, which goes on after the plans in {self.folder}"
            )
        with self._samples.open("a") as file:
            file.write(json.dumps(sample.to_row(), allow_nan=False) + "\n")

    def samples(self) -> list[Sample]:
        """Return all samples so far, and remove a last line that a kill has cut off.

        Raises:
            DataError: another line is damaged.
        """
        data = self._samples.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        if whole != data:
            os.truncate(self._samples, len(whole))
        lines = whole.splitlines()
        return [self._sample(number, line) for number, line in enumerate(lines, start=1)]

    def _sample(self, number: int, line: bytes) -> Sample:
        """Return the sample on a line."""
        try:
            sample = Sample.from_row(json.loads(line))
            problem = problem_of(sample)
        except DAMAGED as error:
            raise self._damaged(number, str(error)) from error
        if problem is not None:
            raise self._damaged(number, problem)
        return sample

    def _damaged(self, number: int, problem: str) -> DataError:
        return DataError(
            f"{self._samples}:{number} is damaged ({problem}); remove this line to collect its "
            f"sample again, or remove {self.folder}"
        )

    def close(self) -> None:
        """Unlock the folder, so that another process can resume the collection."""
        self._lock.release()

    def remove(self) -> None:
        """Delete the folder of a finished collection."""
        shutil.rmtree(self.folder)
        self.close()

    def _check(self, before: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
        current = json.loads(json.dumps(settings))
        differing = [key for key in current if current[key] != before.get(key)]
        if differing:
            changes = "; ".join(
                f"{key}: {before.get(key)!r}, now {current[key]!r}" for key in differing
            )
            raise DataError(
                f"{self.folder} is an unfinished collection with other settings ({changes}); "
                "finish it with those settings, or remove the folder"
            )

    def _locked(self) -> FileLock:
        """Lock the folder; the system unlocks it when the process ends."""
        lock = FileLock(self.folder / "lock")
        try:
            lock.acquire(blocking=False)
        except Timeout as error:
            raise ConfigError(
                f"another process collects into {self.folder}; wait for it, or give another out="
            ) from error
        return lock
