"""JSON files are complete, or what they were before."""

import math
import os

import pytest

from dlrm_sharded.files.errors import ConfigError
from dlrm_sharded.files.json_files import read_json_object, replace_file, write_json


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_json_does_not_have_is_not_written(value, tmp_path):
    write_json(tmp_path / "a.json", {"a": 1.0})
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(tmp_path / "a.json", {"a": [value]})
    assert read_json_object(tmp_path / "a.json", noun="test") == {"a": 1.0}
    assert len(list(tmp_path.iterdir())) == 1


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
