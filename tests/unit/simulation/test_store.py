"""Measurements are kept for a simulation that goes on, and for that simulation alone."""

import json
import logging
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dlrm_sharded.files.errors import ConfigError
from dlrm_sharded.simulation.store import LOCK, MEASUREMENTS, SETTINGS, Store

SETTINGS_A = {"seed": 0, "task": "a", "measure": {"iterations": 3}}


@dataclass(frozen=True)
class Measured:
    ms: float

    def to_json(self) -> dict[str, Any]:
        return {"ms": self.ms}


def kept(store: Store, number: int, ms: float) -> float:
    """What is kept of a rank, which takes so long if it is measured now."""
    read = lambda values: Measured(values["ms"])  # noqa: E731
    return store.kept("a rank", ["rank", number], read=read, measure=lambda: Measured(ms)).ms


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with three measurements."""
    with closing(Store(tmp_path / "out", SETTINGS_A)) as store:
        for i in range(3):
            assert kept(store, i, float(i)) == i
    return tmp_path / "out"


def test_measurements_are_there_again(folder: Path) -> None:
    with closing(Store(folder, SETTINGS_A)) as store:
        assert len(store) == 3
        assert kept(store, 2, 9.0) == 2.0
        assert kept(store, 3, 9.0) == 9.0
        assert len(store) == 4


def test_values_that_cannot_be_read_are_measured_again(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = folder / MEASUREMENTS
    path.write_text(path.read_text().replace('"ms": 2.0', '"s": 2.0'))
    for measured_ms in (7.0, 8.0):  # the latter is not needed
        with closing(Store(folder, SETTINGS_A)) as store:
            assert kept(store, 2, measured_ms) == 7.0
    assert caplog.text.count("a rank is measured again: its times are damaged ('ms')") == 1


@pytest.mark.parametrize("damage", [b"\x00\xff garbage\n", b'{"key": 3}\n', b'{"key": "x", "val'])
def test_damaged_lines_are_measured_again(
    folder: Path, damage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    path = folder / MEASUREMENTS
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + lines[1] + damage)
    with caplog.at_level(logging.WARNING):
        store = Store(folder, SETTINGS_A)
    assert len(caplog.records) == 1
    assert len(store) == 2
    assert kept(store, 2, 5.0) == 5.0
    store.close()
    with closing(Store(folder, SETTINGS_A)) as store:
        assert kept(store, 2, 9.0) == 5.0


def test_damaged_settings_are_written_anew(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (folder / SETTINGS).write_text("{")
    with caplog.at_level(logging.WARNING):
        store = Store(folder, SETTINGS_A)
    assert len(caplog.records) == 1
    assert kept(store, 0, 9.0) == 0.0
    store.close()
    assert json.loads((folder / SETTINGS).read_text())["seed"] == 0


def test_lines_of_another_simulation_are_not_taken(folder: Path) -> None:
    (folder / SETTINGS).unlink()
    with closing(Store(folder, SETTINGS_A | {"seed": 1})) as store:
        assert kept(store, 0, 9.0) == 9.0


def test_the_folder_of_another_simulation_is_refused(folder: Path) -> None:
    before = sorted((path.name, path.read_bytes()) for path in folder.iterdir())
    with pytest.raises(ConfigError, match="seed: 0, now 1"):
        Store(folder, SETTINGS_A | {"seed": 1})
    assert sorted((path.name, path.read_bytes()) for path in folder.iterdir()) == before


def test_folders_with_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(ConfigError, match="other files"):
        Store(tmp_path, SETTINGS_A)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]
    (tmp_path / LOCK).touch()
    (tmp_path / SETTINGS).write_text('{"kind": "something else"}')
    with pytest.raises(ConfigError, match="not of a simulation"):
        Store(tmp_path, SETTINGS_A)


def test_a_file_or_a_used_folder_is_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="out is"):
        Store(tmp_path / "file", SETTINGS_A)
    store = Store(folder, SETTINGS_A)
    with pytest.raises(ConfigError, match="another process"):
        Store(folder, SETTINGS_A)
    store.close()
