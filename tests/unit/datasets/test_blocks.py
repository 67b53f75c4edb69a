"""Samples in blocks: written in any pieces, read in any ranges, refused where they are damaged."""

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrm_sharded.datasets import block_reader
from dlrm_sharded.datasets.block_reader import BlockReader
from dlrm_sharded.datasets.block_writer import PartWriter, complete_part
from dlrm_sharded.datasets.blocks import MANIFEST, BlocksManifest, Feature, Layout
from dlrm_sharded.datasets.encoder import EncodedRows
from dlrm_sharded.files.errors import DataError

NUM_EMBEDDINGS = 2**31 - 1
LAYOUT = Layout(num_dense=3, num_single=4, num_lists=2, block_rows=8)
NUM_ROWS = (21, 0, 16, 1)
FILES = ("dense.npy", "labels.npy", "ids.npy", "lengths.npy", "starts.npy", "values.npy")


class Sample(NamedTuple):
    dense: list[float]
    label: int
    ids: list[int]
    lists: list[list[int]]


def samples(
    number: int, layout: Layout = LAYOUT, *, seed: int = 0, lengths: Sequence[int] = (0, 1, 5)
) -> list[Sample]:
    rng = np.random.default_rng(seed)

    def ids(count: int) -> list[int]:
        return rng.integers(0, NUM_EMBEDDINGS, count).tolist()

    return [
        Sample(
            dense=rng.integers(-5, 5, layout.num_dense).tolist(),
            label=int(rng.integers(2)),
            ids=ids(layout.num_single),
            lists=[ids(rng.choice(lengths)) for _ in range(layout.num_lists)],
        )
        for _ in range(number)
    ]


def columns(rows: Sequence[Sample], layout: Layout = LAYOUT) -> dict[str, Any]:
    """Return the arrays that `append` takes."""
    n = len(rows)
    lengths = [[len(ids) for ids in row.lists] for row in rows]
    return {
        "dense": np.array([row.dense for row in rows]).reshape(n, layout.num_dense),
        "labels": np.array([row.label for row in rows]),
        "ids": np.array([row.ids for row in rows], np.int64).reshape(n, layout.num_single).T,
        "lengths": np.array(lengths, np.int64).reshape(n, layout.num_lists).T,
        "values": [
            np.array([id_ for row in rows for id_ in row.lists[feature]], np.int32)
            for feature in range(layout.num_lists)
        ],
    }


def write(
    folder: Path,
    parts: Sequence[Sequence[Sample]],
    layout: Layout = LAYOUT,
    *,
    piece_rows: Sequence[int] = (11,),
) -> BlocksManifest:
    written = []
    for number, rows in enumerate(parts):
        with PartWriter(folder, number, layout) as writer:
            start = index = 0
            while start < len(rows):
                stop = start + piece_rows[index % len(piece_rows)]
                arrays = columns(rows[start:stop], layout)
                writer.append(EncodedRows(**arrays, num_rare={}))
                for reused in arrays["values"]:
                    reused[:] = -1
                start, index = stop, index + 1
            written.append(writer.finish({"file": f"{number}.csv"}))
    manifest = BlocksManifest(
        features=(
            *(Feature(f"s{i}", NUM_EMBEDDINGS) for i in range(layout.num_single)),
            *(Feature(f"l{i}", NUM_EMBEDDINGS, is_list=True) for i in range(layout.num_lists)),
        ),
        num_dense=layout.num_dense,
        block_rows=layout.block_rows,
        num_train_rows=min(19, sum(map(len, parts))),
        parts=tuple(written),
        source={"x": [1]},
    )
    manifest.save(folder)
    return manifest


@pytest.fixture
def parts() -> list[list[Sample]]:
    return [samples(number, seed=number) for number in NUM_ROWS]


@pytest.fixture
def folder(tmp_path: Path, parts: list[list[Sample]]) -> Path:
    write(tmp_path / "blocks", parts)
    return tmp_path / "blocks"


def assert_rows(
    reader: BlockReader, start: int, stop: int, expected: list[Sample], layout: Layout = LAYOUT
) -> None:
    rows = reader.rows(start, stop)
    wanted = columns(expected[start:stop], layout)
    wanted["values"] = np.concatenate([np.zeros(0, np.int32), *wanted["values"]])
    for name, array in wanted.items():
        found = getattr(rows, name)
        assert found.dtype == (np.float32 if name in ("dense", "labels") else np.int32)
        assert found.flags.c_contiguous
        assert found.flags.writeable
        assert found.base is None, "it is a copy"
        assert np.array_equal(found, array), name


@given(
    layout=st.builds(
        Layout,
        num_dense=st.integers(0, 3),
        num_single=st.integers(0, 3),
        num_lists=st.integers(0, 3),
        block_rows=st.integers(1, 9),
    ).filter(lambda layout: layout.num_single + layout.num_lists > 0),
    num_rows=st.lists(st.integers(0, 25), min_size=1, max_size=4).filter(any),
    piece_rows=st.lists(st.integers(0, 20), min_size=1, max_size=4).filter(any),
    lengths=st.sampled_from([(0,), (0, 1), (3,), (0, 0, 40), (1, 2, 3)]),
    data=st.data(),
)
def test_what_was_appended_is_read(layout, num_rows, piece_rows, lengths, data):
    parts = [samples(n, layout, seed=i, lengths=lengths) for i, n in enumerate(num_rows)]
    everything = [row for part in parts for row in part]
    with tempfile.TemporaryDirectory() as name:
        manifest = write(Path(name), parts, layout, piece_rows=piece_rows)
        reader = BlockReader(Path(name))
        assert reader.manifest == manifest
        assert_rows(reader, 0, len(everything), everything, layout)
        for _ in range(5):
            start = data.draw(st.integers(0, len(everything) - 1))
            stop = data.draw(st.integers(start + 1, len(everything)))
            assert_rows(reader, start, stop, everything, layout)


@pytest.mark.parametrize("piece_rows", [1, 7, 8, 16, 19, 50])
def test_written_in_any_pieces_the_files_are_the_same(tmp_path, folder, parts, piece_rows):
    write(tmp_path / "other", parts, piece_rows=[piece_rows])
    for path in folder.rglob("*.*"):
        assert path.read_bytes() == (tmp_path / "other" / path.relative_to(folder)).read_bytes()


def test_the_files_are_plain_npy_with_the_documented_contents(folder, parts):
    dense, labels, ids, lengths, starts, values = (
        np.load(folder / "part-00000" / name) for name in FILES
    )
    assert [dense.shape, labels.shape, ids.shape] == [(3, 8, 3), (3, 8), (3, 4, 8)]
    assert [lengths.shape, starts.shape] == [(3, 2, 8), (3, 2)]
    dtypes = [array.dtype for array in (dense, labels, ids, lengths, starts, values)]
    assert dtypes == [np.float32, np.uint8, np.int32, np.int32, np.int64, np.int32]
    second = columns(parts[0][8:16])
    assert np.array_equal(ids[1], second["ids"])
    assert np.array_equal(lengths[1], second["lengths"])
    assert np.array_equal(values[starts[1, 0] : starts[2, 0]], np.concatenate(second["values"]))
    assert starts[1, 1] - starts[1, 0] == len(second["values"][0])
    for padded in (dense[2, 5:], labels[2, 5:], ids[2, :, 5:], lengths[2, :, 5:]):
        assert not padded.any()


def test_the_manifest_says_what_was_written(folder, parts):
    manifest = BlockReader(folder).manifest
    assert (manifest.num_rows, manifest.num_train_rows) == (sum(NUM_ROWS), 19)
    assert manifest.source == {"x": [1]}
    for number, (part, rows) in enumerate(zip(manifest.parts, parts, strict=True)):
        lengths = columns(rows)["lengths"]
        assert part.facts == {"file": f"{number}.csv"}
        assert part.num_values == lengths.sum()
        extremes = zip(lengths.min(1, initial=9), lengths.max(1, initial=0), strict=True)
        assert part.list_lengths == (tuple(extremes) if rows else ((0, 0), (0, 0)))


@pytest.mark.parametrize(("start", "stop"), [(-1, 3), (4, 4), (37, 39)])
def test_rows_that_are_not_there(folder, start, stop):
    with pytest.raises(IndexError):
        BlockReader(folder).rows(start, stop)


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ([(3,), (), (3,)], {"s0": 1, "l0": 3, "l1": 3}),
        ([(0,)], {"s0": 1, "l0": 0, "l1": 0}),
        ([(3,), (2,)], None),
        ([(2, 3)], None),
    ],
    ids=str,
)
def test_ids_per_sample(tmp_path, lengths, expected):
    layout = Layout(num_dense=1, num_single=1, num_lists=2, block_rows=4)
    parts = [samples(9 if some else 0, layout, lengths=some) for some in lengths]
    assert write(tmp_path, parts, layout).ids_per_sample == expected


def test_few_files_are_open_however_many_parts_there_are(tmp_path, monkeypatch):
    monkeypatch.setattr(block_reader, "MAX_MAPPED_PARTS", 2)
    parts = [samples(3, seed=number) for number in range(9)]
    write(tmp_path, parts)
    before = len([*Path("/proc/self/fd").iterdir()])
    reader = BlockReader(tmp_path)
    for start in range(27):
        assert_rows(reader, start, start + 1, [row for part in parts for row in part])
        assert len([*Path("/proc/self/fd").iterdir()]) <= before + 2 * len(FILES)


HEADER = b"\x93NUMPY\x01\x00v\x00{'descr': '%s', 'fortran_order': False, 'shape': %s, }"


def write_format_1(folder: Path, rows: list[Sample]) -> None:
    """Write what earlier releases wrote, with 5 blocks of 4 rows."""
    padded = columns([*rows, *[Sample([0.0] * 3, 0, [0] * 4, [])] * 2], ONE_HOT)
    ids = padded["ids"].reshape(4, 5, 4).transpose(1, 0, 2)  # 5 blocks of [4 features, 4 rows]
    files = {
        "ids.npy": (b"<i4", b"(5, 4, 4)", ids.astype("<i4")),
        "dense.npy": (b"<f4", b"(5, 4, 3)", padded["dense"].astype("<f4")),
        "labels.npy": (b"|u1", b"(5, 4)", padded["labels"].astype("|u1")),
    }
    folder.mkdir()
    for name, (descr, shape, array) in files.items():
        header = (HEADER % (descr, shape)).ljust(127) + b"\n"
        (folder / name).write_bytes(header + array.tobytes())
    (folder / MANIFEST).write_text(
        '{"format_version": 1, "num_rows": 18, "num_train_rows": 15, "block_rows": 4,'
        ' "num_dense": 3, "feature_names": ["a", "b", "c", "d"],'
        ' "num_embeddings": [2147483647, 2147483647, 2147483647, 2147483647],'
        ' "file_bytes": {"ids.npy": 448, "dense.npy": 368, "labels.npy": 148},'
        ' "source": {"settings": {"x": 1}}}'
    )


ONE_HOT = Layout(num_dense=3, num_single=4, num_lists=0, block_rows=4)


def test_format_1_is_read(tmp_path):
    rows = samples(18, ONE_HOT)
    write_format_1(tmp_path / "old", rows)
    reader = BlockReader(tmp_path / "old")
    assert reader.manifest.features == tuple(Feature(name, NUM_EMBEDDINGS) for name in "abcd")
    assert (reader.manifest.num_rows, reader.manifest.num_train_rows) == (18, 15)
    assert reader.manifest.source == {"settings": {"x": 1}}
    assert reader.manifest.ids_per_sample == dict.fromkeys("abcd", 1)
    for start, stop in [(0, 18), (0, 4), (4, 8), (3, 9), (17, 18)]:
        assert_rows(reader, start, stop, rows, ONE_HOT)
    (tmp_path / "old/ids.npy").write_bytes(b"")
    with pytest.raises(DataError, match=r"ids.npy should have 448 B, but has 0 B"):
        BlockReader(tmp_path / "old")


Damage = Callable[[Path], object]
FIRST = "part-00000"


def exchange(name: str, old: bytes, new: bytes) -> Damage:
    def damage(folder: Path) -> None:
        content = (folder / name).read_bytes()
        assert content.count(old)
        (folder / name).write_bytes(content.replace(old, new, 1))

    return damage


def cut(name: str) -> Damage:
    return lambda folder: os.truncate(folder / FIRST / name, 130)


def with_fields(**fields: object) -> Damage:
    def damage(folder: Path) -> None:
        found = json.loads((folder / MANIFEST).read_text())
        (folder / MANIFEST).write_text(json.dumps(found | fields))

    return damage


DAMAGES: dict[str, tuple[Damage, str]] = {
    **{f"{name} truncated": (cut(name), f"{name} should have .* has 130 B") for name in FILES},
    "a file missing": (lambda f: (f / FIRST / "values.npy").unlink(), "has 0 B.*convert again"),
    "a part missing": (lambda f: shutil.rmtree(f / "part-00003"), "part-00003.*has 0 B"),
    "type": (exchange(f"{FIRST}/ids.npy", b"<i4", b"<f4"), r"\[3, 4, 8\] float32, and must have"),
    "shape": (exchange(f"{FIRST}/ids.npy", b"4, 8)", b"8, 4)"), r"ids.npy .* \[3, 8, 4\] int32"),
    "no JSON": (exchange(MANIFEST, b"{", b""), "manifest.json is damaged"),
    "no object": (lambda f: (f / MANIFEST).write_text("[1]"), "manifest.json is damaged"),
    "no manifest": (lambda f: (f / MANIFEST).unlink(), "is not a folder of blocks"),
    "later format": (with_fields(format_version=3), "has block format 3, .* formats 1 to 2"),
    "of format 1": (with_fields(format_version=1), "manifest.json is damaged"),
    "unknown key": (with_fields(x=1), "unknown field `x`"),
    "no parts": (with_fields(parts=[], num_train_rows=0), "0 training rows of 0"),
    "rows": (with_fields(num_train_rows=39), "39 training rows of 38"),
    "block size": (with_fields(block_rows=4), r"must have \[6, 4, 3\]"),
    "path": (exchange(MANIFEST, b'"part-00001"', b'"../../part"'), "matching regex"),
}


@pytest.mark.parametrize(("damage", "message"), DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_folder_is_refused(folder, damage, message):
    damage(folder)
    with pytest.raises(DataError, match=message):
        BlockReader(folder).rows(0, sum(NUM_ROWS))


def test_a_part_of_which_a_killed_writer_left_something_is_not_complete(tmp_path, parts):
    killed = PartWriter(tmp_path, 0, LAYOUT)
    killed.append(EncodedRows(**columns(parts[0]), num_rare={}))
    assert complete_part(tmp_path, 0) is None
    with pytest.raises(KeyError), PartWriter(tmp_path, 1, LAYOUT):
        raise KeyError
    assert [path.name for path in tmp_path.iterdir()] == ["part-00000.partial"]
    manifest = write(tmp_path, parts)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *(MANIFEST, "part-00000", "part-00001", "part-00002", "part-00003")
    ]
    assert tuple(complete_part(tmp_path, number) for number in range(4)) == manifest.parts
    killed.__exit__()


def test_a_damaged_part_is_not_complete_and_is_replaced(folder, parts):
    manifest = BlocksManifest.load(folder)
    for damage in (
        cut("values.npy"),
        cut(MANIFEST),
        exchange(f"{FIRST}/{MANIFEST}", b'"num_rows"', b'"num_row"'),
        lambda folder: (folder / FIRST / MANIFEST).unlink(),
    ):
        damage(folder)
        assert complete_part(folder, 0) is None
        assert write(folder, parts) == manifest
        assert complete_part(folder, 0) == manifest.parts[0]
    shutil.copytree(folder / FIRST, folder / "part-00009")
    assert complete_part(folder, 9) is None


def test_a_part_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    synced = []
    open_files = Path("/proc/self/fd")
    monkeypatch.setattr(os, "fsync", lambda n: synced.append((open_files / str(n)).readlink()))
    with PartWriter(tmp_path, 0, LAYOUT) as writer:
        writer.finish({})
    partial = tmp_path / f"{FIRST}.partial"
    assert synced == [*(partial / name for name in (*FILES, MANIFEST)), partial, tmp_path]
