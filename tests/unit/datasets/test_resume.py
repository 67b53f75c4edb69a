"""A conversion that was killed goes on with its file, and gives what an undisturbed one gives."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from dlrm_sharded.datasets import conversion
from dlrm_sharded.datasets.conversion import convert
from dlrm_sharded.datasets.schema import read_schema, schema_yaml
from dlrm_sharded.datasets.table_source import TableSource
from dlrm_sharded.files.errors import DataError
from tests.unit.datasets.tables import Files, click_log

KILLED = """
import os, signal, sys
from pathlib import Path
from dlrm_sharded.datasets.conversion import convert
from dlrm_sharded.datasets.schema import read_schema
from dlrm_sharded.datasets.table_source import TableSource

left = int(sys.argv[3])

def count(event, arguments):  # the process dies before it opens or renames the file of this number
    global left
    if event in ("open", "os.rename") and str(sys.argv[2]) in str(arguments[0]):
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)

schema = read_schema(sys.argv[1])
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
sys.addaudithook(count)
convert(TableSource(sys.argv[4:], schema, block_rows=64), Path(sys.argv[2]))
"""


def source(log: Files, **options: Any) -> TableSource:
    return TableSource(log.paths, read_schema(log.schema), **({"block_rows": 64} | options))


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.mark.slow
@pytest.mark.parametrize("place", range(0, 50, 5))
def test_killed_conversions_go_on(tmp_path: Path, place: int) -> None:
    log = click_log(tmp_path)
    (tmp_path / "schema.yaml").write_text(schema_yaml(read_schema(log.schema)))
    convert(source(log), tmp_path / "whole")
    words = [str(tmp_path / "schema.yaml"), str(tmp_path / "blocks"), str(place), *log.paths]
    command = [sys.executable, "-c", KILLED, *words]
    assert subprocess.run(command, check=False, timeout=300).returncode == -signal.SIGKILL
    assert not (tmp_path / "blocks").exists()
    convert(source(log), tmp_path / "blocks")
    assert contents(tmp_path / "blocks") == contents(tmp_path / "whole")
    assert not [*tmp_path.glob("*.partial"), *tmp_path.glob("*.lock")]


class Reads:
    """Notes which files are read, and stops in the middle of one of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, stop_at: int, error: BaseException) -> None:
        self.names: list[str] = []
        self._read, self.stop_at, self._error = conversion.read_good_rows, stop_at, error
        monkeypatch.setattr(conversion, "read_good_rows", self)
        monkeypatch.setattr(conversion, "MAX_THREADS", 1)

    def __call__(self, schema: Any, columns: Any, tally: Any, **options: Any) -> Iterator[Any]:
        if len(self.names) == self.stop_at:  # a file that is begun before the thread ends
            raise self._error
        self.names.append(tally.path.name)
        yield from self._read(schema, columns, tally, **options)
        if len(self.names) == self.stop_at:
            raise self._error


@pytest.mark.parametrize("stop_at", range(1, 7))
@pytest.mark.parametrize("change", ["nothing", "schema", "files", "content"])
def test_a_stopped_conversion_goes_on_if_nothing_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop_at: int, change: str
) -> None:
    log, blocks = click_log(tmp_path), tmp_path / "blocks"
    reads = Reads(monkeypatch, stop_at, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        convert(source(log), blocks)
    assert len(reads.names) == stop_at
    reads.stop_at = -1
    if change == "schema":
        log.schema["min_count"] = 1
    elif change == "files":
        log.paths.reverse()
    elif change == "content":
        frame = pl.read_parquet(log.paths[0])
        frame.with_columns(clicked=1 - pl.col("clicked"))[:50].write_parquet(log.paths[0])
    convert(source(log), blocks)
    assert len(reads.names) == (7 if change == "nothing" else stop_at + 6)
    convert(source(log), tmp_path / "whole")
    assert contents(blocks) == contents(tmp_path / "whole")


@pytest.mark.parametrize("stop_at", [1, 6])
def test_an_error_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop_at: int
) -> None:
    log = click_log(tmp_path)
    before = set(tmp_path.iterdir())
    Reads(monkeypatch, stop_at, DataError("damaged"))
    with pytest.raises(DataError, match="damaged"):
        convert(source(log), tmp_path / "blocks")
    assert set(tmp_path.iterdir()) == before
