"""An unfinished collection: goes on where it was, under the conditions under which it was begun."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from dlrm_sharded.calibration.costs_file import manifest_path, write_costs
from dlrm_sharded.calibration.journal import Journal
from dlrm_sharded.calibration.samples import Sample
from dlrm_sharded.files.errors import ConfigError, DataError
from tests.unit.calibration.cases import sample

SETTINGS = {"hardware": "cpu: test", "batch_sizes": [64, 128], "measure": {"iterations": 3}}
SAMPLES = [sample(i) for i in range(3)]


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "costs.parquet"


@pytest.fixture
def lines(out: Path) -> Path:
    """What a killed collection of `SAMPLES` leaves."""
    journal = Journal(out, SETTINGS)
    assert journal.samples() == []
    for measured in SAMPLES:
        journal.append(measured)
    journal.close()
    return journal.folder / "samples.jsonl"


def read(out: Path, **changes: Any) -> list[Sample]:
    """What a collection finds that is begun with these settings."""
    journal = Journal(out, SETTINGS | changes)
    found = journal.samples()
    journal.close()
    return found


def test_goes_on_where_it_was(out: Path, lines: Path) -> None:
    journal = Journal(out, {**SETTINGS, "batch_sizes": (64, 128)})
    assert journal.samples() == SAMPLES
    journal.append(sample(3))
    assert journal.samples() == [*SAMPLES, sample(3)]
    journal.remove()
    assert list(out.parent.iterdir()) == []


def test_a_torn_last_line_is_passed_over_wherever_it_is_torn(out: Path, lines: Path) -> None:
    whole = lines.read_bytes()
    last_starts = whole.rstrip(b"\n").rfind(b"\n") + 1
    for stop in range(last_starts, len(whole), 97):
        lines.write_bytes(whole[:stop])
        journal = Journal(out, SETTINGS)
        assert journal.samples() == SAMPLES[:2]
        journal.append(SAMPLES[2])
        assert journal.samples() == SAMPLES
        assert lines.read_bytes().endswith(b"\n" + whole[last_starts:])
        journal.close()


def test_other_settings_are_refused(out: Path, lines: Path) -> None:
    changed = {**SETTINGS, "hardware": "cpu: other", "measure": {"iterations": 4}}
    with pytest.raises(DataError) as error:
        Journal(out, {**changed, "threads": 2})
    message = str(error.value)
    assert str(lines.parent) in message
    assert "hardware: 'cpu: test', now 'cpu: other'" in message
    assert "measure: {'iterations': 3}, now {'iterations': 4}" in message
    assert "threads: None, now 2" in message
    assert "batch_sizes" not in message


def assert_refused(out: Path, message: str = "exists already") -> None:
    with pytest.raises(ConfigError, match=message):
        Journal(out, SETTINGS)


def test_what_is_there_is_not_overwritten(out: Path) -> None:
    """Neither the data, with its manifest or alone, nor the manifest of other data."""
    out.parent.mkdir()
    write_costs(out, SAMPLES, {})
    before = out.read_bytes()
    assert_refused(out)
    manifest_path(out).unlink()
    assert_refused(out)
    assert out.read_bytes() == before
    assert not out.with_name("costs.parquet.partial").exists()
    out.unlink()
    manifest_path(out).write_text("{}")
    assert_refused(out)


def test_a_kill_between_data_and_manifest_loses_nothing(out: Path, lines: Path) -> None:
    write_costs(out, SAMPLES, {})
    manifest_path(out).unlink()
    assert read(out) == SAMPLES


def test_two_processes_do_not_collect_into_one(out: Path, lines: Path) -> None:
    first = Journal(out, SETTINGS)
    assert_refused(out, "another process collects into")
    first.append(dataclasses.replace(SAMPLES[0], number=9))
    first.close()
    assert len(read(out)) == 4
