"""Files as people have them: values, forms, malformed lines."""

import gzip
import logging
import math

import numpy as np
import pytest

from dlrm_sharded.datasets.criteo_sample import write_criteo_sample
from dlrm_sharded.files.errors import DataError
from tests.unit.datasets.criteo.reference import (
    NUM_ROWS,
    all_rows,
    assert_same,
    converted,
    line,
    num_embeddings,
    reference,
    write_lines,
)

IDS = "part-00000/ids.npy"


@pytest.mark.parametrize("min_count", [1, 3])
def test_round_trip_against_plain_python(tmp_path, sample, small_chunks, min_count):
    blocks = converted(tmp_path, files=str(sample), min_count=min_count)
    assert blocks.manifest.num_train_rows == NUM_ROWS - NUM_ROWS // 7
    expected = reference([sample], num_val=NUM_ROWS // 7, min_count=min_count)
    assert_same(blocks, expected)
    assert (expected[2] == 1).any()
    assert (expected[2] == 0).any()
    assert (expected[2].max(axis=1) < num_embeddings(blocks)).all()


def test_a_cap_is_a_modulus_before_the_vocabulary(tmp_path, sample):
    blocks = converted(tmp_path, files=str(sample), max_ind_range=50, min_count=2)
    assert_same(blocks, reference([sample], num_val=NUM_ROWS // 7, min_count=2, cap=50))
    assert max(num_embeddings(blocks)) == 51


def test_hashing_is_the_modulus_alone(tmp_path, sample, small_chunks):
    caps = [10 + i for i in range(26)]
    blocks = converted(tmp_path, files=str(sample), id_mapping="hash", max_ind_range=caps)
    lines = [text.split("\t")[14:] for text in sample.read_text().splitlines()]
    expected = [[int(c or "0", 16) % caps[i] for i, c in enumerate(row)] for row in lines]
    assert np.array_equal(all_rows(blocks).ids.T, expected)
    assert num_embeddings(blocks) == tuple(caps)


def test_missing_negative_and_extreme_values(tmp_path):
    integers = ("", "-3", "0", "1", "2147483647", "-2147483648", "007", *("",) * 6)
    ids = ("", "ffffffff", "FFFFFFFF", "00000000", "a", *("",) * 21)
    path = write_lines(tmp_path / "t", [line("0", integers, ids), line()])
    rows = all_rows(converted(tmp_path, files=path, val_share=0, min_count=1))
    expected = [0, 0, 0, math.log(2), math.log(2**31), 0, math.log(8), *[0] * 6]
    np.testing.assert_allclose(rows.dense[0], expected, rtol=1e-6)
    assert rows.ids[:, 0].tolist() == [0, 3, 3, 0, 2, *[0] * 21]
    assert rows.labels.tolist() == [0, 1]


def test_ids_unseen_in_training_share_row_1(tmp_path):
    common, new = line(), line(ids=("beef",) * 26)
    train = write_lines(tmp_path / "train", [common] * 5)
    val = write_lines(tmp_path / "val", [new, common])
    blocks = converted(tmp_path, files=train, val_files=val, min_count=1)
    assert blocks.manifest.num_train_rows == 5
    assert all_rows(blocks).ids[0].tolist() == [2] * 5 + [1, 2]
    assert set(num_embeddings(blocks)) == {3}


def test_days_come_in_natural_order_and_the_last_is_validation(tmp_path, small_chunks):
    for day in (2, 10, 9):
        write_criteo_sample(tmp_path / f"day_{day}", num_rows=40 + day, seed=day)
    blocks = converted(
        tmp_path, files=str(tmp_path / "day_*"), val_files=[str(tmp_path / "day_10")], min_count=1
    )
    train = [tmp_path / "day_2", tmp_path / "day_9"]
    assert_same(blocks, reference(train, val_paths=[tmp_path / "day_10"]))
    assert blocks.manifest.num_train_rows == 42 + 49


@pytest.mark.parametrize("form", ["crlf", "gz", "no_last_newline", "blank_lines", "crlf_gz"])
def test_forms_of_a_file_give_the_same(tmp_path, sample, blocks_dir, small_chunks, form):
    content = sample.read_bytes()
    if "crlf" in form:
        content = content.replace(b"\n", b"\r\n")
    if form == "no_last_newline":
        content = content.rstrip(b"\n")
    if form == "blank_lines":
        content = b"\n" + content.replace(b"\n", b"\n\n", 30) + b"\n\n"
    if "gz" in form:
        content = gzip.compress(content)
    path = tmp_path / ("train.gz" if "gz" in form else "train")
    path.write_bytes(content)
    converted(tmp_path, files=str(path))
    for name in ("ids.npy", "dense.npy", "labels.npy"):
        assert (tmp_path / "blocks/part-00000" / name).read_bytes() == (
            blocks_dir / "part-00000" / name
        ).read_bytes()


@pytest.mark.parametrize("kept", [0.1, 0.5, 0.999])
def test_a_truncated_gzip(tmp_path, sample, small_chunks, kept):
    content = gzip.compress(sample.read_bytes())
    (tmp_path / "day_0.gz").write_bytes(content[: int(len(content) * kept)])
    with pytest.raises(DataError, match=r"day_0.gz is a truncated or damaged gzip file"):
        converted(tmp_path, files=str(tmp_path / "day_0.gz"))
    assert [path.name for path in tmp_path.iterdir()] == ["day_0.gz"]


@pytest.mark.parametrize("content", [b"", b"\n\n", gzip.compress(b"", mtime=0)])
def test_an_empty_file(tmp_path, content):
    (tmp_path / "day_0").write_bytes(content)
    with pytest.raises(DataError, match="day_0 has no samples"):
        converted(tmp_path, files=str(tmp_path / "day_0"))


@pytest.mark.parametrize("name", ["train.txt", "day_*"])
def test_a_missing_file_is_named(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError) as error:
        converted(tmp_path, files=name)
    assert f"{tmp_path / name} does not exist" in str(error.value)


MALFORMED = {
    "39_columns": (line()[2:], "39 columns, must be 40 (label, 13 integers, 26 categoricals); a"),
    "41_columns": (line() + "\t", "41 columns, must be 40 (label, 13 integers, 26 categoricals)"),
    "one_column": ("hello", "1 columns, must be 40"),
    "label_2": (line("2"), "the label is '2', must be 0 or 1"),
    "label_empty": (line(""), "the label is '', must be 0 or 1"),
    "label_negative": (line("-1"), "the label is '-1', must be 0 or 1"),
    "float": (line(integers=("1",) * 12 + ("1.5",)), "int_12 is '1.5', must be empty or an int"),
    "33_bits": (line(integers=("2147483648",) + ("",) * 12), "int_0 is '2147483648'"),
    "space": (line(integers=(" 3",) + ("",) * 12), "int_0 is ' 3', must be"),
    "text": (line(integers=("", "x") + ("",) * 11), "int_1 is 'x', must be"),
    "nul": (line(integers=("\0",) + ("",) * 12), r"int_0 is '\x00', must be"),
    "quote": (line('"1"'), "the label is '\"1\"', must be"),
    "not_hex": (line(ids=("",) * 25 + ("0000000g",)), "cat_25 is '0000000g', must be empty or 8"),
    "hex_too_long": (line(ids=("123456789",) + ("",) * 25), "cat_0 is '123456789', must be"),
    "hex_negative": (line(ids=("-0000001",) + ("",) * 25), "cat_0 is '-0000001', must be"),
    "not_ascii": (line(ids=("é",) + ("",) * 25), r"cat_0 is '\xc3\xa9', must be"),
    "carriage_return": (line(ids=("a\rb",) + ("",) * 25), r"cat_0 is 'a\rb', must be"),
}


@pytest.mark.parametrize(("text", "fault"), MALFORMED.values(), ids=MALFORMED)
@pytest.mark.parametrize("position", [0, 57, NUM_ROWS])
def test_a_malformed_line_is_left_out_and_named(
    tmp_path, sample, blocks_dir, small_chunks, caplog, text, fault, position
):
    lines = sample.read_text().splitlines()
    lines.insert(position, text)
    path = write_lines(tmp_path / "t", lines)
    with caplog.at_level(logging.WARNING):
        blocks = converted(tmp_path, files=path)
    first, total = caplog.messages
    assert first.startswith(f"malformed line left out: {path}:{position + 1}: {fault}")
    assert total == f"{path}: 1 of {NUM_ROWS + 1} lines are malformed and left out"
    assert blocks.manifest.source["num_malformed"] == [1]
    assert (tmp_path / "blocks" / IDS).read_bytes() == (blocks_dir / IDS).read_bytes()


def test_a_test_file_without_labels_stops_at_the_first_chunk(tmp_path, small_chunks):
    path = write_lines(tmp_path / "test.txt", [line()[2:]] * 1000)
    with pytest.raises(DataError, match="so far") as error:
        converted(tmp_path, files=path)
    assert "39 columns, must be 40" in str(error.value)
    assert "a test file without labels cannot be used" in str(error.value)
