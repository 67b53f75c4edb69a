"""What an unfinished collection has measured: appended sample by sample, so that a kill loses none.

`<out>.partial` holds `settings.json`, which a resumed collection must share, and `samples.jsonl`.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dlrm_sharded.calibration.samples import Sample, manifest_path
from dlrm_sharded.errors import ConfigError, DataError, UserError
from dlrm_sharded.json_files import read_json_object, write_json


class Journal:
    """The folder beside `out`, for as long as the process has it.

    Args:
        settings: what was asked for, and of which hardware; JSON.

    Raises:
        ConfigError: `out` is there already, or is where its manifest goes, or another process
            has the folder.
        DataError: the folder is of other settings.
    """

    def __init__(self, out: Path, settings: Mapping[str, Any]) -> None:
        if out == manifest_path(out):
            raise ConfigError(
                f"out is {out}, where the manifest goes; give the data another name, such as "
                f"{out.with_suffix('.parquet')}"
            )
        self.folder = out.with_name(f"{out.name}.partial")
        self._samples = self.folder / "samples.jsonl"
        found = self.folder / "settings.json"
        # a kill may have left the data without its manifest; the journal has it all
        if manifest_path(out).exists() or (out.exists() and not found.exists()):
            raise ConfigError(f"{out} is there already; give another out=, or remove it")
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = self._locked()
        if not found.exists():
            os.truncate(self._samples, 0)
        if self._samples.stat().st_size == 0:
            write_json(found, settings)
            return
        try:
            self._check(read_json_object(found, what="settings"), settings)
        except UserError:
            self.close()
            raise

    def append(self, sample: Sample) -> None:
        with self._samples.open("a") as file:
            file.write(json.dumps(sample.to_row()) + "\n")

    def samples(self) -> list[Sample]:
        """All that was measured so far, without a last line that a kill cut off."""
        data = self._samples.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        if whole != data:
            os.truncate(self._samples, len(whole))
        return [Sample.from_row(json.loads(line)) for line in whole.splitlines()]

    def close(self) -> None:
        """Leave the folder to whoever goes on with it."""
        os.close(self._lock)

    def remove(self) -> None:
        shutil.rmtree(self.folder)
        self.close()

    def _check(self, before: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
        wanted = json.loads(json.dumps(settings))
        differing = [key for key in wanted if wanted[key] != before.get(key)]
        if differing:
            changes = "; ".join(
                f"{key}: {before.get(key)!r}, now {wanted[key]!r}" for key in differing
            )
            raise DataError(
                f"{self.folder} is an unfinished collection of other settings ({changes}); finish "
                "it with those, or remove it"
            )

    def _locked(self) -> int:
        """A descriptor with the samples' lock, which the system drops when the process ends."""
        lock = os.open(self._samples, os.O_WRONLY | os.O_CREAT)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(lock)
            raise ConfigError(
                f"another process collects into {self.folder}; wait for it, or give another out="
            ) from error
        return lock
