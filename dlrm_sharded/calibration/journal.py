"""The journal of an unfinished collection, to which every sample is appended when it is measured.

A collection that is killed loses no sample. The folder `<out>.partial` holds `samples.jsonl` and
`settings.json`; a resumed collection must have the same settings.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dlrm_sharded.calibration.costs_file import manifest_path
from dlrm_sharded.calibration.samples import Sample, problem_of, sound_sample
from dlrm_sharded.files.errors import ConfigError, DataError
from dlrm_sharded.files.json_files import read_json_object, write_json
from dlrm_sharded.files.line_file import LineFile, changed_settings, locked


class Journal:
    """The folder beside `out`, locked until `close` or the end of the process.

    Args:
        settings: settings and hardware of the collection; JSON.

    Raises:
        ConfigError: `out` exists, or another process has locked the folder.
        DataError: the folder belongs to a collection with other settings.
    """

    def __init__(self, out: Path, settings: Mapping[str, Any]) -> None:
        self.folder = out.with_name(f"{out.name}.partial")
        settings_path = self.folder / "settings.json"
        # a kill may have left the data without its manifest; the journal still has all samples
        if manifest_path(out).exists() or (out.exists() and not settings_path.exists()):
            raise ConfigError(f"{out} exists already; give another out=, or remove it")
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = locked(
            self.folder / "lock",
            refusal=f"another process collects into {self.folder}; wait for it, or give another "
            "out=",
        )
        self._file = LineFile(self.folder / "samples.jsonl", "sample")
        if not settings_path.exists():
            self._file.path.write_bytes(b"")
        try:
            if self._file.path.stat().st_size == 0:
                write_json(settings_path, settings)
            before = read_json_object(settings_path, noun="settings")
            if changes := changed_settings(before, settings):
                raise DataError(
                    f"{self.folder} is an unfinished collection with other settings ({changes}); "
                    "finish it with those settings, or remove the folder"
                )
            self._samples = list(self._file.read(sound_sample).values())
        except BaseException:
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
        self._file.append(sample.to_row())
        self._samples.append(sample)

    def samples(self) -> list[Sample]:
        """Return all samples so far."""
        return list(self._samples)

    def close(self) -> None:
        """Unlock the folder, so that another process can resume the collection."""
        self._lock.release()

    def remove(self) -> None:
        """Delete the folder of a finished collection."""
        shutil.rmtree(self.folder)
        self.close()
