"""The rows of a benchmark on disk, one file for each study, so that it can go on where it ended."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dlrm_sharded.files.errors import ConfigError
from dlrm_sharded.files.json_files import read_json_object, write_json
from full_benchmark.study import Item, Row, Study

SETTINGS = "settings.json"


class Store:
    """Rows in a folder.

    Args:
        settings: what all rows in the folder have in common: sizes, hardware, versions.

    Raises:
        ConfigError: the folder has rows of other settings.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / SETTINGS
        if path.exists():
            found = read_json_object(path, noun="settings")
            different = [key for key in settings if found.get(key) != settings[key]]
            if different:
                raise ConfigError(
                    f"{folder} holds a benchmark with other {', '.join(different)}; give another "
                    "folder with --out, or remove this one"
                )
        else:
            write_json(path, dict(settings))

    def rows(self, study: str) -> list[Row]:
        """Return the rows of a study."""
        return [row for line in self._lines(study) for row in line["rows"]]

    def is_done(self, study: Study, item: Item) -> bool:
        """Return whether the rows of an item are there."""
        return item.key in self._done(study.name)

    def seconds(self, study: str) -> float:
        """Return how long the items of a study took, over all calls."""
        return sum(line["seconds"] for line in self._lines(study))

    def loads(self, study: str) -> list[float]:
        """Return the load averages before the items of a study, where they were noted."""
        return [line["load"] for line in self._lines(study) if line.get("load") is not None]

    def add(
        self,
        study: Study,
        item: Item,
        rows: Sequence[Row],
        *,
        seconds: float,
        load: float | None = None,
    ) -> None:
        """Write the rows of an item, with the names of its study and basis.

        Args:
            seconds: how long the item took.
            load: load average of the machine before it.
        """
        names = {"study": study.name, "basis": study.basis, "item": item.key}
        entry = {
            "item": item.key,
            "seconds": seconds,
            "load": load,
            "rows": [names | row for row in rows],
        }
        path = self._path(study.name)
        whole = path.read_text() if path.exists() else ""
        if whole and not whole.endswith("\n"):
            path.write_text(whole[: whole.rfind("\n") + 1])
        with path.open("a") as file:
            file.write(f"{json.dumps(entry)}\n")

    def _done(self, study: str) -> set[str]:
        return {line["item"] for line in self._lines(study)}

    def _lines(self, study: str) -> list[dict[str, Any]]:
        """Return the items of a study; a line that was cut off by a kill is passed over."""
        path = self._path(study)
        if not path.exists():
            return []
        lines = path.read_text().splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def _path(self, study: str) -> Path:
        return self._folder / f"{study}.jsonl"
