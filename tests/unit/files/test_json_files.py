"""JSON files are complete, or what they were before, and nothing else is waited at."""

import math
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from dlrm_sharded.calibration.costs_file import read_costs
from dlrm_sharded.checkpoint.manifest import check_parts, read_manifest
from dlrm_sharded.datasets.blocks import BlocksManifest
from dlrm_sharded.files import json_files
from dlrm_sharded.files.errors import ConfigError, UserError
from dlrm_sharded.files.json_files import read_file, read_json_object, replace_file, write_json
from dlrm_sharded.files.line_file import LineFile
from dlrm_sharded.hardware.artifact import artifact_kind
from dlrm_sharded.runs import owner
from tests.unit.checkpoint.cases import PART, write


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
    "a dataset": ("manifest.json", lambda path: BlocksManifest.load(path.parent)),
    "lines": ("cases.jsonl", lambda path: LineFile(path, "case").read(dict)),
    "a line more": ("cases.jsonl", lambda path: LineFile(path, "case").append({})),
    "a claim": (".owner", lambda path: owner.claim(path.parent).release()),
    "costs": ("costs.json", lambda path: read_costs(path.with_suffix(".parquet"))),
    "prices": ("prices.safetensors", artifact_kind),
}


@pytest.mark.usefixtures("ends_in_time")
@pytest.mark.parametrize(("name", "read"), READERS.values(), ids=READERS)
def test_a_pipe_in_the_place_of_a_file_is_not_waited_at(name, read, tmp_path, monkeypatch):
    monkeypatch.setattr(owner, "SILENCE_S", 0.2)
    os.mkfifo(tmp_path / name)
    with suppress(UserError, OSError):
        read(tmp_path / name)


@pytest.mark.usefixtures("ends_in_time")
def test_a_pipe_in_the_place_of_a_part_is_not_waited_at(rank, tmp_path):
    """It has the size of an empty file, which a manifest may state."""
    checkpoint = write(tmp_path, rank)
    (checkpoint / PART).unlink()
    os.mkfifo(checkpoint / PART)
    manifest = read_manifest(checkpoint)
    manifest.files[PART] = manifest.files[PART]._replace(size_bytes=0)
    with pytest.raises(UserError, match="it is not a regular file"):
        check_parts(manifest)


def test_what_has_no_end_or_is_too_large_is_not_read(tmp_path, monkeypatch):
    (tmp_path / "endless").symlink_to("/dev/zero")
    with pytest.raises(ConfigError, match="endless: it is not a regular file"):
        read_json_object(tmp_path / "endless", noun="task")
    (tmp_path / "large").write_bytes(b"{}" * 600)
    monkeypatch.setattr(json_files, "MAX_BYTES", 1000)
    with pytest.raises(ConfigError, match="it has 1,200 B, of which at most 1,000 B are read"):
        read_json_object(tmp_path / "large", noun="task")


def test_a_pipe_that_a_shell_has_opened_is_read():
    """As of `task=<(command)`."""
    read, written = os.pipe()
    with os.fdopen(written, "wb") as file:
        file.write(b"some bytes")
    assert read_file(f"/dev/fd/{read}") == b"some bytes"
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
