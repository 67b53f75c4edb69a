"""Conversions: options, script, made-up logs."""

import pytest
from scipy.stats import mannwhitneyu

from dlrm_sharded.commands import convert_criteo
from dlrm_sharded.datasets.block_reader import BlockReader
from dlrm_sharded.datasets.criteo import CriteoSource
from dlrm_sharded.datasets.criteo_sample import sample_rows
from dlrm_sharded.files.errors import ConfigError
from tests.unit.datasets.criteo.reference import NUM_ROWS


def test_the_converted_folder_holds_nothing_else(blocks_dir):
    assert sorted(path.name for path in blocks_dir.iterdir()) == ["manifest.json", "part-00000"]
    names = sorted(path.name for path in (blocks_dir / "part-00000").iterdir())
    assert names == ["dense.npy", "ids.npy", "labels.npy", "manifest.json"]


def test_the_script(tmp_path, sample, run_command):
    out = tmp_path / "out"
    done = run_command(convert_criteo.main, sample, f"out={out}", "max_ind_range=90")
    assert (done.returncode, done.stdout) == (0, f"{out}: 700 samples\n")
    manifest = BlockReader(out).manifest
    assert manifest.num_rows == NUM_ROWS
    assert manifest.source["settings"] == CriteoSource("x", max_ind_range=90).settings()


def test_the_script_with_an_error_of_the_user(tmp_path, run_command):
    done = run_command(convert_criteo.main, tmp_path / "no", f"out={tmp_path / 'out'}")
    assert (done.returncode, done.stdout) == (2, "")
    assert f"error: {tmp_path / 'no'} does not exist" in done.stderr


def test_the_sample_has_a_signal():
    rows = sample_rows(0, 20_000, seed=0)
    positive, negative = rows.logits[rows.labels], rows.logits[~rows.labels]
    auroc = mannwhitneyu(positive, negative).statistic / (len(positive) * len(negative))
    assert 0.75 < auroc < 0.82
    assert 0.22 < rows.labels.mean() < 0.30


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("files", value) for value in (None, 5, [5], "", ["a\0b"])),
        *(("val_files", value) for value in (5, [None])),
        *(("val_share", value) for value in ("a", None, 1, 1.0, float("nan"))),
        *(("block_rows", value) for value in (2.5, "a", True, 0, 10**9)),
        *(("min_count", value) for value in (2.5, 0)),
        *(("max_ind_range", value) for value in (2.5, ["7"] * 26, [5] * 25, True)),
        *(("max_ind_range", value) for value in (0, [5, 5], 2**31)),
        *(("max_malformed_share", value) for value in ("a", -0.1)),
        ("id_mapping", "magic"),
    ],
    ids=str,
)
def test_options_that_cannot_be_used(key, value):
    with pytest.raises(ConfigError, match=key):
        CriteoSource(**({"files": "x"} | {key: value}))


def test_hashing_needs_a_range():
    with pytest.raises(ConfigError, match="needs max_ind_range"):
        CriteoSource("x", id_mapping="hash")
