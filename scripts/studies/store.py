"""The one store of studies: cases that have ended, in a file that grows by one line for each.

A case is a part of a study that can be run without the others, such as a test. Its line is on disk
before the next case begins, so a kill at any second loses only the case that was running. The file
has three kinds of lines:

{"conditions": {...}}                       what the cases below it were run under
{"planned": [...]}                          names of all cases of the study
{"case": ..., "figures": ..., "failures": [...]}

This module loads no torch, and tests write their lines themselves.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlrm_sharded.files.errors import ConfigError, DataError
from dlrm_sharded.files.json_files import read_json_object, write_json
from dlrm_sharded.files.line_file import LineFile
from dlrm_sharded.files.provenance import commit, cpu_name, versions
from dlrm_sharded.ranks.gpus import nvidia_smi, visible_gpus

KINDS = {"conditions", "planned", "case"}
"""Keys that tell what a line is."""


@dataclass(frozen=True, slots=True)
class EndedCase:
    """A case that has ended.

    Args:
        figures: what it found out; any JSON.
        failures: checks that failed; if there are any, the case is run again.
    """

    figures: Any
    failures: Sequence[str]


class Cases:
    """The file of one study's cases.

    Args:
        conditions: what cases must have been run under to count; None for those of the last line
            that has some.
        is_strict: whether a file with cases of other conditions is refused; in others, such cases
            do not count.

    Raises:
        ConfigError: the file is refused.
    """

    def __init__(
        self, path: Path, conditions: Mapping[str, Any] | None = None, *, is_strict: bool = False
    ) -> None:
        self._file = LineFile(path, "case")
        self.planned: list[str] = []
        self.ended: dict[str, EndedCase] = {}
        self.num_other = 0
        lines = self._file.read(_line).values()
        headers = [line["conditions"] for line in lines if "conditions" in line]
        last = headers[-1] if headers else {}
        wanted = last if conditions is None else dict(conditions)
        if is_strict and headers and (other := changes(last, wanted)):
            raise ConfigError(f"{path} has rows of other settings ({other}); give another file")
        current: Mapping[str, Any] = {}
        for line in lines:
            if "conditions" in line:
                current = line["conditions"]
            elif current != wanted:
                self.num_other += "case" in line
            elif "planned" in line:
                self.planned = line["planned"]
            else:
                self.ended[line["case"]] = EndedCase(line["figures"], line["failures"])
        if last != wanted:
            self._append({"conditions": wanted})

    def finished(self, name: str) -> EndedCase | None:
        """Return a case that has ended without failures; None if it is to be run."""
        case = self.ended.get(name)
        return None if case is None or case.failures else case

    @property
    def num_finished(self) -> int:
        return len(self.planned) - len(self.missing)

    @property
    def missing(self) -> list[str]:
        """Names of the planned cases that are to be run."""
        return [name for name in self.planned if self.finished(name) is None]

    def plan(self, names: Iterable[str]) -> None:
        """Name all cases of the study."""
        planned = list(names)
        if planned != self.planned:
            self.planned = planned
            self._append({"planned": planned})

    def add(self, name: str, figures: Any, failures: Sequence[str]) -> None:
        """Write a case that has just ended."""
        self._append({"case": name, "figures": figures, "failures": list(failures)})
        self.ended[name] = EndedCase(figures, failures)

    def _append(self, line: Mapping[str, Any]) -> None:
        self._file.append(line)


def _line(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    if len(KINDS & fields.keys()) != 1:
        raise DataError(f"it has none of {', '.join(sorted(KINDS))}")
    return fields


def cases_path(out: Path, study: str) -> Path:
    """Return the file of a study's cases."""
    return out / f"{study}.cases.jsonl"


def conditions() -> dict[str, str]:
    """Return what figures depend on; cases and studies under others do not count."""
    name = cpu_name()
    if visible_gpus():
        name = ", ".join(nvidia_smi("--query-gpu=name", "--format=csv,noheader").splitlines())
    hardware = f"{name}; {len(os.sched_getaffinity(0))} cores"
    return {"commit": commit() or "unknown", **versions(), "hardware": hardware}


def keep_settings(out: Path, settings: Mapping[str, Any]) -> None:
    """Write what all studies in a folder have in common.

    Raises:
        ConfigError: the folder has studies with other settings.
    """
    out.mkdir(parents=True, exist_ok=True)
    path = out / "settings.json"
    earlier = read_json_object(path, noun="settings") if path.exists() else settings
    if other := changes(earlier, settings):
        raise ConfigError(f"{out} has steps with other settings ({other}); give another folder")
    write_json(path, settings)


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Return which settings or conditions differ; an empty text if none does."""
    return ", ".join(
        f"{key} {_short(before.get(key))}, now {_short(now.get(key))}"
        for key in dict.fromkeys([*before, *now])
        if before.get(key) != now.get(key)
    )


def _short(value: Any) -> str:
    return repr(value[:40] if isinstance(value, str) else value)
