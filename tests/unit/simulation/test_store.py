"""Measurements are kept for a simulation that goes on, and for that simulation alone."""

import json
import logging
from pathlib import Path

import pytest

from dlrm_sharded.files.errors import ConfigError
from dlrm_sharded.simulation.store import LOCK, MEASUREMENTS, SETTINGS, Store

SETTINGS_A = {"seed": 0, "task": "a", "measure": {"iterations": 3}}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with three measurements."""
    store = Store(tmp_path / "out", SETTINGS_A)
    for i in range(3):
        store.put(store.key("rank", i), {"ms": float(i)})
    store.close()
    return tmp_path / "out"


def test_measurements_are_there_again(folder: Path) -> None:
    store = Store(folder, SETTINGS_A)
    assert len(store) == 3
    assert store.get(store.key("rank", 2)) == {"ms": 2.0}
    assert store.get(store.key("rank", 3)) is None
    store.close()


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
    store.put(store.key("rank", 2), {"ms": 5.0})
    store.close()
    store = Store(folder, SETTINGS_A)
    assert store.get(store.key("rank", 2)) == {"ms": 5.0}
    store.close()


def test_damaged_settings_are_written_anew(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (folder / SETTINGS).write_text("{")
    with caplog.at_level(logging.WARNING):
        store = Store(folder, SETTINGS_A)
    assert len(caplog.records) == 1
    assert store.get(store.key("rank", 0)) == {"ms": 0.0}
    store.close()
    assert json.loads((folder / SETTINGS).read_text())["seed"] == 0


def test_lines_of_another_simulation_are_not_taken(folder: Path) -> None:
    (folder / SETTINGS).unlink()
    store = Store(folder, SETTINGS_A | {"seed": 1})
    assert store.get(store.key("rank", 0)) is None
    store.close()


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
