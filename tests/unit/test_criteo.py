import gzip
import logging
import math
import multiprocessing
import os
import runpy
import signal
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from dlrm_sharded.data import criteo_convert, criteo_tsv
from dlrm_sharded.data.base import BatchStream
from dlrm_sharded.data.blocks import Blocks
from dlrm_sharded.data.criteo import CriteoDataset, CriteoSource, convert
from dlrm_sharded.data.criteo_sample import sample_rows, write_criteo_sample
from dlrm_sharded.errors import ConfigError, DataError

NUM_ROWS, BLOCK_ROWS = 700, 32
SCRIPT = Path(__file__).parents[2] / "scripts" / "convert_criteo.py"


def line(label="1", integers=("5",) * 13, ids=("0000abcd",) * 26) -> str:
    return "\t".join((label, *integers, *ids))


def reference(paths, *, num_val=None, val_paths=(), min_count=1, cap=None):
    """Labels, dense and table rows, one plain Python line at a time."""
    labels, dense, ids = [], [], []
    for path in (*paths, *val_paths):
        for text in path.read_text().splitlines():
            columns = text.split("\t")
            labels.append(int(columns[0]))
            dense.append([math.log(1 + max(0, int(c or "0"))) for c in columns[1:14]])
            raw = [int(c or "0", 16) for c in columns[14:]]
            ids.append([id_ % cap if cap else id_ for id_ in raw])
    if num_val is None:
        num_val = sum(len(path.read_text().splitlines()) for path in val_paths)
    rows = []
    for column in zip(*ids, strict=True):
        counts = Counter(column[: len(labels) - num_val])
        known = sorted(id_ for id_, count in counts.items() if id_ and count >= min_count)
        index = {id_: 2 + i for i, id_ in enumerate(known)}
        rows.append([0 if id_ == 0 else index.get(id_, 1) for id_ in column])
    return np.array(labels), np.array(dense, np.float32), np.array(rows)


def converted(tmp_path, name="blocks", **options) -> Blocks:
    convert(CriteoSource(block_rows=BLOCK_ROWS, **options), tmp_path / name)
    return Blocks(tmp_path / name)


def all_rows(blocks):
    return blocks.rows(0, blocks.manifest.num_rows)


def assert_same(blocks, expected):
    rows = all_rows(blocks)
    labels, dense, ids = expected
    assert np.array_equal(rows.labels, labels)
    np.testing.assert_allclose(rows.dense, dense, rtol=1e-6)
    assert np.array_equal(rows.ids, ids)


@pytest.fixture(scope="module")
def sample(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("criteo") / "train.txt"
    write_criteo_sample(path, num_rows=NUM_ROWS)
    return path


@pytest.fixture(scope="module")
def blocks_dir(sample) -> Path:
    folder = sample.parent / "blocks"
    convert(CriteoSource(str(sample), block_rows=BLOCK_ROWS), folder)
    return folder


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(criteo_tsv, "CHUNK_BYTES", 20_000)
    monkeypatch.setattr(criteo_convert, "_PIECE_ROWS", 37)


def write_lines(path: Path, lines) -> str:
    path.write_text("".join(text + "\n" for text in lines))
    return str(path)


# Values


@pytest.mark.parametrize("min_count", [1, 3])
def test_round_trip_against_plain_python(tmp_path, sample, small_chunks, min_count):
    blocks = converted(tmp_path, files=str(sample), min_count=min_count)
    assert blocks.manifest.num_train_rows == NUM_ROWS - NUM_ROWS // 7
    expected = reference([sample], num_val=NUM_ROWS // 7, min_count=min_count)
    assert_same(blocks, expected)
    assert (expected[2] == 1).any()
    assert (expected[2] == 0).any()
    assert (expected[2].max(axis=1) < blocks.manifest.num_embeddings).all()


def test_a_cap_is_a_modulus_before_the_vocabulary(tmp_path, sample):
    blocks = converted(tmp_path, files=str(sample), max_ind_range=50, min_count=2)
    assert_same(blocks, reference([sample], num_val=NUM_ROWS // 7, min_count=2, cap=50))
    assert max(blocks.manifest.num_embeddings) == 51


def test_hashing_is_the_modulus_alone(tmp_path, sample, small_chunks):
    caps = [10 + i for i in range(26)]
    blocks = converted(tmp_path, files=str(sample), id_mapping="hash", max_ind_range=caps)
    lines = [text.split("\t")[14:] for text in sample.read_text().splitlines()]
    expected = [[int(c or "0", 16) % caps[i] for i, c in enumerate(row)] for row in lines]
    assert np.array_equal(all_rows(blocks).ids.T, expected)
    assert blocks.manifest.num_embeddings == tuple(caps)


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
    assert set(blocks.manifest.num_embeddings) == {3}


def test_days_come_in_natural_order_and_the_last_is_validation(tmp_path, small_chunks):
    for day in (2, 10, 9):
        write_criteo_sample(tmp_path / f"day_{day}", num_rows=40 + day, seed=day)
    blocks = converted(
        tmp_path, files=str(tmp_path / "day_*"), val_files=[str(tmp_path / "day_10")], min_count=1
    )
    train = [tmp_path / "day_2", tmp_path / "day_9"]
    assert_same(blocks, reference(train, val_paths=[tmp_path / "day_10"]))
    assert blocks.manifest.num_train_rows == 42 + 49


# Forms of a file


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
        assert (tmp_path / "blocks" / name).read_bytes() == (blocks_dir / name).read_bytes()


@pytest.mark.parametrize("kept", [0.1, 0.5, 0.999])
def test_a_truncated_gzip(tmp_path, sample, small_chunks, kept):
    content = gzip.compress(sample.read_bytes())
    (tmp_path / "day_0.gz").write_bytes(content[: int(len(content) * kept)])
    with pytest.raises(DataError, match=r"day_0.gz is a truncated or damaged gzip file"):
        converted(tmp_path, files=str(tmp_path / "day_0.gz"))
    assert [path.name for path in tmp_path.iterdir()] == ["day_0.gz"]


def test_a_damaged_gzip(tmp_path, sample):
    content = bytearray(gzip.compress(sample.read_bytes()))
    content[len(content) // 2] ^= 0xFF
    (tmp_path / "day_0.gz").write_bytes(content)
    with pytest.raises(DataError, match=r"truncated or damaged gzip|malformed"):
        converted(tmp_path, files=str(tmp_path / "day_0.gz"))


@pytest.mark.parametrize("content", [b"", b"\n\n", gzip.compress(b"")])
def test_an_empty_file(tmp_path, content):
    (tmp_path / "day_0").write_bytes(content)
    with pytest.raises(DataError, match="day_0 has no samples"):
        converted(tmp_path, files=str(tmp_path / "day_0"))


def test_a_file_without_lines(tmp_path, monkeypatch):
    monkeypatch.setattr(criteo_tsv, "_MAX_LINE_BYTES", 10_000)
    monkeypatch.setattr(criteo_tsv, "CHUNK_BYTES", 1000)
    (tmp_path / "day_0").write_bytes(b"1\t" * 10_000)
    with pytest.raises(DataError, match=r"day_0:1 is longer than 10,000 B"):
        converted(tmp_path, files=str(tmp_path / "day_0"))


@pytest.mark.parametrize("name", ["train.txt", "day_*"])
def test_a_missing_file_is_named(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError) as error:
        converted(tmp_path, files=name)
    assert f"{tmp_path / name} does not exist" in str(error.value)


def test_a_file_that_is_there_plain_and_as_gz(tmp_path, sample):
    for name in ("day_0", "day_0.gz"):
        (tmp_path / name).write_bytes(sample.read_bytes())
    with pytest.raises(DataError, match=r"day_0 is named twice"):
        converted(tmp_path, files=str(tmp_path / "day_*"))


# Malformed lines

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
    assert (tmp_path / "blocks/ids.npy").read_bytes() == (blocks_dir / "ids.npy").read_bytes()


def test_one_line_too_long_and_one_too_short_do_not_make_up_for_each_other(tmp_path, caplog):
    bad = [line() + "\tab", line()[:-9]]
    path = write_lines(tmp_path / "t", [line(), *bad, line()] * 2)
    blocks = converted(tmp_path, files=path, max_malformed_share=0.5)
    assert blocks.manifest.num_rows == 4
    numbers = [m.split(":")[2] for m in caplog.messages if m.startswith("malformed")]
    assert numbers == ["2", "3", "6", "7"]


def test_only_the_first_malformed_lines_of_each_file_are_logged(tmp_path, caplog):
    paths = [
        write_lines(tmp_path / name, [line()] * 20 + ["bad"] * num_bad)
        for name, num_bad in (("a", 9), ("b", 7))
    ]
    blocks = converted(tmp_path, files=paths, max_malformed_share=0.4)
    assert blocks.manifest.source["num_malformed"] == [9, 7]
    assert sum("/a:" in message and "bad" not in message for message in caplog.messages) == 6
    assert f"{paths[1]}: 7 of 27 lines are malformed and left out" in caplog.messages


@pytest.mark.parametrize(
    ("share", "num_bad", "stops"),
    [(0, 1, True), (0.001, 1, False), (0.001, 2, True), (0.1, 10, False), (0.1, 11, True)],
)
def test_the_malformed_share_of_100_lines(tmp_path, share, num_bad, stops):
    lines = [line()] * (100 - num_bad) + ["bad"] * num_bad
    path = write_lines(tmp_path / "t", lines)
    if not stops:
        assert converted(tmp_path, files=path, max_malformed_share=share)
        return
    with pytest.raises(DataError) as error:
        converted(tmp_path, files=path, max_malformed_share=share)
    assert f"{num_bad} of 100 lines in total are malformed" in str(error.value)
    assert f"{path}:{101 - num_bad}: 1 columns, must be 40" in str(error.value)
    assert [entry.name for entry in tmp_path.iterdir()] == ["t"]


def test_a_test_file_without_labels_stops_at_the_first_chunk(tmp_path, small_chunks):
    path = write_lines(tmp_path / "test.txt", [line()[2:]] * 1000)
    with pytest.raises(DataError, match="so far") as error:
        converted(tmp_path, files=path)
    assert "39 columns, must be 40" in str(error.value)
    assert "a test file without labels cannot be used" in str(error.value)


# Conversion as a whole


def test_the_converted_folder_holds_nothing_else(blocks_dir):
    names = sorted(path.name for path in blocks_dir.iterdir())
    assert names == ["dense.npy", "ids.npy", "labels.npy", "manifest.json"]


def _convert_slowly(path: str, folder: Path) -> None:
    def finish(self, writer, num_train_rows):
        (folder.parent / "reached").touch()
        time.sleep(60)

    criteo_convert._VocabularyIds.finish = finish
    convert(CriteoSource(path), folder)


def test_a_killed_conversion_is_not_taken_for_whole(tmp_path, sample):
    folder = tmp_path / "blocks"
    context = multiprocessing.get_context("forkserver")
    process = context.Process(target=_convert_slowly, args=(str(sample), folder))
    process.start()
    while not (tmp_path / "reached").exists():
        assert process.is_alive()
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    with pytest.raises(DataError, match="holds no converted data"):
        CriteoDataset(folder, batch_size=8, embedding_dim=4).prepare()
    with pytest.raises(DataError, match="is not a folder of blocks"):
        Blocks(tmp_path / "blocks.partial")
    dataset = CriteoDataset(folder, batch_size=8, embedding_dim=4, source=CriteoSource(str(sample)))
    assert dataset.num_batches("train") == 75
    assert not (tmp_path / "blocks.partial").exists()


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
        runpy.run_path(str(SCRIPT), run_name="__main__")
    return done.value.code


def test_the_script(tmp_path, sample, monkeypatch, capsys):
    out = tmp_path / "out"
    assert run_script(monkeypatch, sample, "--out", out, "--max-ind-range", 90) == 0
    assert capsys.readouterr().out == f"{out}: 700 samples\n"
    manifest = Blocks(out).manifest
    assert manifest.num_rows == NUM_ROWS
    assert manifest.source["settings"] == CriteoSource("", max_ind_range=90).settings()


def test_the_script_with_an_error_of_the_user(tmp_path, monkeypatch, capsys):
    assert run_script(monkeypatch, tmp_path / "no", "--out", tmp_path / "out") == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert f"error: {tmp_path / 'no'} does not exist" in said.err


# The dataset


def test_batches_are_the_rows_in_order(sample, blocks_dir):
    dataset = CriteoDataset(blocks_dir, batch_size=48, embedding_dim=8)
    labels, dense, ids = reference([sample], num_val=NUM_ROWS // 7, min_count=3)
    assert dataset.num_dense == 13
    for split, first, num_batches in (("train", 0, 600 // 48), ("val", 600, 100 // 48)):
        assert dataset.num_batches(split) == num_batches
        for index in range(num_batches):
            batch = dataset.batch(split, index, rank=0, world_size=1)
            rows = slice(first + index * 48, first + index * 48 + 48)
            assert np.array_equal(batch.labels, labels[rows])
            assert batch.labels.dtype == torch.float32
            np.testing.assert_allclose(batch.dense_features, dense[rows], rtol=1e-6)
            assert np.array_equal(batch.sparse_features.values(), ids[:, rows].reshape(-1))
        with pytest.raises(IndexError):
            dataset.batch(split, num_batches, rank=0, world_size=1)


def test_the_kjt_has_one_id_per_feature_and_sample(blocks_dir):
    dataset = CriteoDataset(blocks_dir, batch_size=48, embedding_dim=8)
    kjt = dataset.batch("train", 1, rank=1, world_size=2).sparse_features
    assert kjt.keys() == [f"cat_{i}" for i in range(26)]
    assert kjt.stride() == 24
    assert kjt.lengths().tolist() == [1] * (26 * 24)
    assert kjt.offsets().tolist() == list(range(26 * 24 + 1))
    assert kjt.offset_per_key() == list(range(0, 26 * 24 + 1, 24))
    plain = type(kjt).from_lengths_sync(kjt.keys(), kjt.values(), kjt.lengths().clone())
    for key, jagged in plain.to_dict().items():
        assert torch.equal(jagged.values(), kjt[key].values())
    for ours, theirs in zip(kjt.split([20, 6]), plain.split([20, 6]), strict=True):
        assert torch.equal(ours.values(), theirs.values())
        assert torch.equal(ours.lengths(), theirs.lengths())


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("batch_size", [12, 32 * 3, 32 * 6, 30])
def test_the_shares_of_the_ranks_make_the_global_batch(blocks_dir, batch_size, world_size):
    dataset = CriteoDataset(blocks_dir, batch_size=batch_size, embedding_dim=8)
    for split in ("train", "val"):
        for index in range(dataset.num_batches(split)):
            whole = dataset.batch(split, index, rank=0, world_size=1)
            shares = [
                dataset.batch(split, index, rank=rank, world_size=world_size)
                for rank in range(world_size)
            ]
            assert torch.equal(torch.cat([b.labels for b in shares]), whole.labels)
            dense = torch.cat([b.dense_features for b in shares])
            assert torch.equal(dense, whole.dense_features)
            ids = torch.cat([b.sparse_features.values().view(26, -1) for b in shares], dim=1)
            assert torch.equal(ids, whole.sparse_features.values().view(26, -1))


def test_a_batch_can_be_changed_without_changing_the_data(blocks_dir):
    dataset = CriteoDataset(blocks_dir, batch_size=32, embedding_dim=8)
    for _ in range(2):
        batch = dataset.batch("train", 0, rank=0, world_size=1)
        assert batch.sparse_features.values().max() > 0
        batch.sparse_features.values().zero_()
        batch.dense_features.zero_()


def test_a_resumed_stream_equals_an_uninterrupted_one(blocks_dir):
    def stream():
        dataset = CriteoDataset(blocks_dir, batch_size=40, embedding_dim=8)
        return BatchStream(dataset, "train", rank=1, world_size=2, shuffle_seed=3)

    def fingerprints(batches):
        return [batch.sparse_features.values().tolist() for batch in batches]

    whole = stream()
    expected = fingerprints(whole) + fingerprints(whole)
    first = stream()
    fingerprints(first)
    head = fingerprints(next(first) for _ in range(4))
    resumed = stream()
    resumed.load_state_dict(first.state_dict())
    assert head + fingerprints(resumed) == expected[15:]


def test_tables_are_profiled_on_the_data(blocks_dir):
    tables = CriteoDataset(blocks_dir, batch_size=100, embedding_dim=8).tables
    blocks = Blocks(blocks_dir)
    assert [table.name for table in tables] == [f"cat_{i}" for i in range(26)]
    assert [t.num_embeddings for t in tables] == list(blocks.manifest.num_embeddings)
    assert {(t.embedding_dim, t.pooling_factor) for t in tables} == {(8, 1.0)}
    uses = np.unique(blocks.rows(0, 100).ids[0], return_counts=True)[1]
    assert tables[0].reuse_histogram[0] == pytest.approx((uses == 1).mean())


def test_converts_at_the_first_use_and_not_again(tmp_path, sample):
    source = CriteoSource([str(sample)])
    dataset = CriteoDataset(tmp_path / "b", batch_size=50, embedding_dim=8, source=source)
    assert not (tmp_path / "b").exists()
    dataset.prepare()
    made = (tmp_path / "b/manifest.json").stat().st_mtime_ns
    CriteoDataset(tmp_path / "b", batch_size=50, embedding_dim=8, source=source).prepare()
    assert (tmp_path / "b/manifest.json").stat().st_mtime_ns == made


def test_converted_data_of_another_source_is_refused(tmp_path, sample):
    mine = tmp_path / "train.txt"
    mine.write_bytes(sample.read_bytes())

    def prepare(path=mine, **options):
        source = CriteoSource(str(path), **options)
        CriteoDataset(tmp_path / "b", batch_size=50, embedding_dim=8, source=source).prepare()

    prepare()
    with pytest.raises(DataError, match=r"min_count was 3, is now 7.*blocks_dir"):
        prepare(min_count=7)
    other = tmp_path / "other.txt"
    write_criteo_sample(other, num_rows=20)
    with pytest.raises(DataError, match=r"train_files .* were .*train.txt.*are now .*other.txt"):
        prepare(other)
    mine.unlink()
    prepare()


def test_a_batch_larger_than_the_training_part(blocks_dir):
    with pytest.raises(ConfigError, match=r"batch_size is 601, but .* has only 600 samples"):
        CriteoDataset(blocks_dir, batch_size=601, embedding_dim=8).prepare()


# The made-up logs


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
