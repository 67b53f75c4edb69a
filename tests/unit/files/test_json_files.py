"""JSON files are complete, or what they were before."""

import math
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from dlrm_sharded.checkpoint.manifest import read_manifest
from dlrm_sharded.files.errors import ConfigError, UserError
from dlrm_sharded.files.json_files import read_json_object, replace_file, write_json
from dlrm_sharded.files.line_file import LineFile
from dlrm_sharded.runs import owner


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_json_does_not_have_is_not_written(value, tmp_path):
    write_json(tmp_path / "a.json", {"a": 1.0})
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(tmp_path / "a.json", {"a": [value]})
    assert read_json_object(tmp_path / "a.json", noun="test") == {"a": 1.0}
    assert len(list(tmp_path.iterdir())) == 1


READERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "an object": ("run.json", lambda path: read_json_object(path, noun="run")),
    "a checkpoint": ("manifest.json", lambda path: read_manifest(path.parent)),
    "lines": ("cases.jsonl", lambda path: LineFile(path, "case").latest(dict)),
    "a claim": (".owner", lambda path: owner.claim(path.parent).release()),
}


@pytest.mark.usefixtures("ends_in_time")
@pytest.mark.parametrize(("name", "read"), READERS.values(), ids=READERS)
def test_a_pipe_in_the_place_of_a_file_is_not_waited_at(name, read, tmp_path, monkeypatch):
    monkeypatch.setattr(owner, "SILENCE_S", 0.2)
    os.mkfifo(tmp_path / name)
    with suppress(UserError, OSError):
        read(tmp_path / name)


def test_a_pipe_that_a_shell_has_opened_is_read():
    """As of `task=<(command)`."""
    read, written = os.pipe()
    with os.fdopen(written, "wb") as file:
        file.write(b"{}")
    assert read_json_object(f"/dev/fd/{read}", noun="task") == {}
    os.close(read)


@pytest.mark.usefixtures("ends_in_time")
def test_a_repeated_key_among_many_is_named(tmp_path):
    keys = [*(str(number) for number in range(200_000)), "last", "last"]
    (tmp_path / "a.json").write_text("{" + ", ".join(f'"{key}": 0' for key in keys) + "}")
    with pytest.raises(ConfigError, match="the key 'last' is there 2 times in one object"):
        read_json_object(tmp_path / "a.json", noun="test")


def test_a_file_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    """Else a crash of the host may leave an empty file."""
    synced = []
    monkeypatch.setattr(os, "fsync", lambda number: synced.append(list(tmp_path.glob("a.json"))))
    replace_file(tmp_path / "a.json", b"{}")
    assert synced == [[]]
