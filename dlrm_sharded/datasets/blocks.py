"""The format of samples that are stored on disk in blocks, as plain .npy files.

A folder has one subfolder for each part of the samples, and `manifest.json`, which describes all of
them and is written last. A part, such as the samples of one input file, holds N blocks of
B = `block_rows` samples with F1 features of one id and F2 features that are lists of ids:
    dense.npy      [N, B, num_dense] fp32
    labels.npy     [N, B] uint8
    ids.npy        [N, F1, B] int32, feature-major, so that one block is the values of one KJT
    lengths.npy    [N, F2, B] int32, the number of ids in each list
    starts.npy     [N, F2] int64, where the ids of a feature in a block begin in values.npy
    values.npy     [V] int32, the ids of the lists: by block, in a block by feature, then by row
    manifest.json  sizes of these files, and other properties of the part
A part without features of one kind has no files for them. Features of one id come before lists. The
last block of a part is padded with zeros. Rows are numbered through all parts: the first
`num_train_rows` are for training, the rest for validation.

Folders of format 1 are read, too: they are one part without lists, beside the manifest.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from msgspec import Meta

from dlrm_sharded.files.errors import DataError
from dlrm_sharded.files.json_files import replace_file
from dlrm_sharded.files.json_forms import read_form
from dlrm_sharded.files.limited import Count, PositiveInt, Text

MANIFEST = "manifest.json"
FORMAT_VERSION = 2
DTYPES: dict[str, np.dtype[Any]] = {
    "dense.npy": np.dtype(np.float32),
    "labels.npy": np.dtype(np.uint8),
    "ids.npy": np.dtype(np.int32),
    "lengths.npy": np.dtype(np.int32),
    "starts.npy": np.dtype(np.int64),
    "values.npy": np.dtype(np.int32),
}
"""Names of the files of a part, and the types of their values."""

PartFolder = Annotated[str, Meta(pattern=r"^(\.|part-\d{5,})$")]
"""Name of a part's folder; in format 1, the part is in the folder of the manifest."""

CONVERT_AGAIN = "remove the folder and convert again"


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Numbers that give the shapes of a part's files.

    Args:
        num_single: number of features that have one id in each sample.
        num_lists: number of features that have a list of ids in each sample.
    """

    num_dense: int
    num_single: int
    num_lists: int
    block_rows: int

    @classmethod
    def of(cls, features: Sequence[Feature], num_dense: int, block_rows: int) -> Layout:
        num_lists = sum(feature.is_list for feature in features)
        num_single = len(features) - num_lists
        return cls(
            num_dense=num_dense, num_single=num_single, num_lists=num_lists, block_rows=block_rows
        )

    @property
    def files(self) -> tuple[str, ...]:
        """Names of the files of a part."""
        return (
            *("dense.npy", "labels.npy"),
            *(("ids.npy",) if self.num_single else ()),
            *(("lengths.npy", "starts.npy", "values.npy") if self.num_lists else ()),
        )

    def shapes(self, num_blocks: int, num_values: int) -> dict[str, tuple[int, ...]]:
        """Return the shape of each array; `num_values` is the number of ids in all lists."""
        return {
            "dense.npy": (num_blocks, self.block_rows, self.num_dense),
            "labels.npy": (num_blocks, self.block_rows),
            "ids.npy": (num_blocks, self.num_single, self.block_rows),
            "lengths.npy": (num_blocks, self.num_lists, self.block_rows),
            "starts.npy": (num_blocks, self.num_lists),
            "values.npy": (num_values,),
        }


@dataclass(frozen=True, slots=True)
class Feature:
    """A categorical feature: its ids are 0 ... num_embeddings - 1."""

    name: Text
    num_embeddings: PositiveInt
    is_list: bool = False


@dataclass(frozen=True, slots=True)
class PartManifest:
    """Describes one part of a folder of blocks.

    Args:
        num_rows: number of samples, without the padding.
        file_bytes: size of each file.
        num_values: number of ids in all lists.
        list_lengths: shortest and longest list of each list feature.
        facts: description of how the part was made, in any form; the name is a key on disk.
    """

    folder: PartFolder
    num_rows: Count
    file_bytes: Mapping[str, PositiveInt]
    num_values: Count = 0
    list_lengths: tuple[tuple[Count, Count], ...] = ()
    facts: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class BlocksManifest:
    """Describes a folder of blocks.

    Args:
        features: those of one id, then those that are lists.
        num_train_rows: number of samples for training, which come first.
        source: description of how the folder was made, in any form.
    """

    features: tuple[Feature, ...]
    num_dense: Count
    block_rows: PositiveInt
    num_train_rows: Count
    parts: tuple[PartManifest, ...]
    source: Mapping[str, Any]

    def __post_init__(self) -> None:
        if not self.num_train_rows <= self.num_rows > 0:
            raise ValueError(f"{self.num_train_rows} training rows of {self.num_rows}")

    def save(self, folder: Path) -> None:
        text = json.dumps({"format_version": FORMAT_VERSION, **asdict(self)}, indent=1)
        replace_file(folder / MANIFEST, (text + "\n").encode())

    @classmethod
    def load(cls, folder: Path) -> BlocksManifest:
        """Read the manifest of a folder, which may have format 1.

        Raises:
            DataError: there is none, it is damaged, or it has a format of a later release.
        """
        path = folder / MANIFEST
        damaged = f"{path} is damaged, so {CONVERT_AGAIN}"
        try:
            fields = json.loads(path.read_bytes())
            version = fields.pop("format_version")
            if version == 1:
                fields = _from_format_1(**fields)
        except (FileNotFoundError, NotADirectoryError):
            raise DataError(
                f"{folder} is not a folder of blocks: it has no {MANIFEST}, which a "
                "conversion writes last: convert again, or correct the path"
            ) from None
        except (AttributeError, LookupError, RecursionError, TypeError, ValueError) as e:
            raise DataError(f"{damaged}: {e!r}") from e
        if version not in (1, FORMAT_VERSION):
            raise DataError(
                f"{folder} has block format {version}, this release reads the formats 1 to "
                f"{FORMAT_VERSION}; {CONVERT_AGAIN}"
            )
        return read_form(fields, cls, name=damaged)

    @functools.cached_property
    def num_rows(self) -> int:
        return sum(part.num_rows for part in self.parts)

    @functools.cached_property
    def layout(self) -> Layout:
        return Layout.of(self.features, self.num_dense, self.block_rows)

    @property
    def ids_per_sample(self) -> dict[str, int] | None:
        """Number of ids of each feature in every sample; None if one of them varies."""
        lengths, *others = {part.list_lengths for part in self.parts if part.num_rows}
        if others or any(shortest < longest for shortest, longest in lengths):
            return None
        counts = [1] * self.layout.num_single + [longest for _, longest in lengths]
        return {feature.name: n for feature, n in zip(self.features, counts, strict=True)}


def check_sizes(folder: Path, part: PartManifest) -> None:
    """Raise DataError if a file of a part does not have the size it was written with."""
    for name, expected in part.file_bytes.items():
        path = folder / part.folder / name
        size = path.stat().st_size if path.is_file() else 0
        if size != expected:
            raise DataError(
                f"{path} should have {expected:,} B, but has {size:,} B: it was truncated or "
                f"replaced after the conversion; {CONVERT_AGAIN}"
            )


def _from_format_1(
    *,
    feature_names: list[str],
    num_embeddings: list[int],
    num_rows: int,
    file_bytes: dict[str, int],
    **others: Any,
) -> dict[str, Any]:
    """Convert the fields of a format 1 manifest to the current format."""
    features = zip(feature_names, num_embeddings, strict=True)
    return {
        **others,
        "features": [{"name": name, "num_embeddings": rows} for name, rows in features],
        "parts": [{"folder": ".", "num_rows": num_rows, "file_bytes": file_bytes}],
    }
