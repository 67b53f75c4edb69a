"""A conversion is whole or not there; options, script, made-up logs."""

import shutil
import subprocess
import sys

import numpy as np
import pytest

from dlrm_sharded.commands import convert_criteo
from dlrm_sharded.datasets import criteo_convert
from dlrm_sharded.datasets.blocks import BlockReader
from dlrm_sharded.datasets.criteo import CriteoDataset, CriteoSource, convert
from dlrm_sharded.datasets.criteo_sample import sample_rows
from dlrm_sharded.files.errors import ConfigError, DataError
from tests.unit.datasets.criteo.reference import COMMAND, NUM_ROWS


def test_the_converted_folder_holds_nothing_else(blocks_dir):
    names = sorted(path.name for path in blocks_dir.iterdir())
    assert names == ["dense.npy", "ids.npy", "labels.npy", "manifest.json"]


class KilledError(BaseException):
    """Stands for a kill."""


def test_a_killed_conversion_is_not_taken_for_whole(tmp_path, sample, monkeypatch):
    folder, partial = tmp_path / "blocks", tmp_path / "blocks.partial"

    def finish(self, writer, num_train_rows):
        shutil.copytree(partial, tmp_path / "left_by_a_kill")
        raise KilledError

    with monkeypatch.context() as patched:
        patched.setattr(criteo_convert.VocabularyIds, "finish", finish)
        with pytest.raises(KilledError):
            convert(CriteoSource(str(sample)), folder)
    (tmp_path / "left_by_a_kill").rename(partial)
    with pytest.raises(DataError, match="holds no converted data"):
        CriteoDataset(folder, batch_size=8, embedding_dim=4).num_batches("train")
    with pytest.raises(DataError, match="is not a folder of blocks"):
        BlockReader(partial)
    dataset = CriteoDataset(folder, batch_size=8, embedding_dim=4, source=CriteoSource(str(sample)))
    assert dataset.num_batches("train") == 75
    assert not partial.exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"val_share": 1.0}, "val_share"),
        ({"max_malformed_share": -0.1}, "max_malformed_share"),
        ({"id_mapping": "magic"}, "id_mapping"),
        ({"id_mapping": "hash"}, "needs max_ind_range"),
        ({"min_count": 0}, "min_count"),
        ({"block_rows": 0}, "block_rows"),
        ({"max_ind_range": 0}, "max_ind_range"),
        ({"max_ind_range": [5, 5]}, "max_ind_range"),
        ({"max_ind_range": 2**31}, "max_ind_range"),
    ],
)
def test_options_that_cannot_be_used(options, message):
    with pytest.raises(ConfigError, match=message):
        CriteoSource("x", **options)


def run_script(monkeypatch, *arguments) -> int:
    monkeypatch.setattr(sys, "argv", ["convert_criteo.py", *map(str, arguments)])
    with pytest.raises(SystemExit) as done:
        sys.exit(convert_criteo.main())
    return done.value.code


def test_the_script(tmp_path, sample, monkeypatch, capsys):
    out = tmp_path / "out"
    assert run_script(monkeypatch, sample, f"out={out}", "max_ind_range=90") == 0
    assert capsys.readouterr().out == f"{out}: 700 samples\n"
    manifest = BlockReader(out).manifest
    assert manifest.num_rows == NUM_ROWS
    assert manifest.source["settings"] == CriteoSource("x", max_ind_range=90).settings()


def test_the_script_with_an_error_of_the_user(tmp_path, monkeypatch, capsys):
    assert run_script(monkeypatch, tmp_path / "no", f"out={tmp_path / 'out'}") == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert f"error: {tmp_path / 'no'} does not exist" in printed.err


def test_sample_rows_do_not_depend_on_where_they_are_cut():
    whole, part = sample_rows(0, 90, seed=1), sample_rows(30, 60, seed=1)
    assert np.array_equal(whole.ids[:, 30:], part.ids)
    assert np.array_equal(whole.labels[30:], part.labels)
    assert not np.array_equal(whole.ids[:, 30:], sample_rows(30, 60, seed=2).ids)


def test_the_sample_has_a_signal():
    rows = sample_rows(0, 20_000, seed=0)
    order = np.argsort(rows.logits)
    rank = np.empty(len(order))
    rank[order] = np.arange(len(order))
    positive, num_positive = rows.labels, rows.labels.sum()
    auroc = (rank[positive].sum() - num_positive * (num_positive - 1) / 2) / (
        num_positive * (len(order) - num_positive)
    )
    assert 0.75 < auroc < 0.82
    assert 0.22 < rows.labels.mean() < 0.30


def test_a_full_disk(tmp_path, sample):
    """One message, and nothing is left; a limit on the size of files stands for the disk."""
    command = [sys.executable, "-m", COMMAND, str(sample), f"out={tmp_path / 'out'}"]
    done = subprocess.run(
        ["bash", "-c", 'ulimit -f 20; exec "$@"', "bash", *command],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert f"error: cannot write {tmp_path / 'out'}: File too large; nothing is left" in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("files", value) for value in (None, 5, [5], "", ["a\0b"])),
        *(("val_files", value) for value in (5, [None])),
        *(("val_share", value) for value in ("a", None, 1, float("nan"))),
        *(("block_rows", value) for value in (2.5, "a", True, 10**9)),
        *(("min_count", value) for value in (2.5, 0)),
        *(("max_ind_range", value) for value in (2.5, ["7"] * 26, [5] * 25, True)),
        ("max_malformed_share", "a"),
    ],
    ids=str,
)
def test_options_of_a_wrong_type(key, value):
    with pytest.raises(ConfigError, match=key):
        CriteoSource(**({"files": "x"} | {key: value}))
