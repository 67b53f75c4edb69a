"""The files of a training run, and the settings of their conversion to blocks."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlrm_sharded.datasets.schema import Schema
from dlrm_sharded.datasets.source_files import count_rows, find_files
from dlrm_sharded.files.errors import DataError, check_count, check_number

MAX_BLOCK_ROWS = 2**24


@dataclass(frozen=True, slots=True)
class TableSource:
    """Files to convert, and the settings of the conversion.

    Args:
        files: paths, folders or globs for training; their rows are in this order.
        validation_files: the same for validation; they are not used for training, even if `files`
            matches them too.
        val_share: share of all rows, from the end, for validation if `validation_files` is empty.
        block_rows: samples of a block; reading is fastest for batches of this size.
        max_malformed_share: largest share of malformed rows in a file; more are an error.
    """

    files: str | Sequence[str]
    schema: Schema
    validation_files: str | Sequence[str] = ()
    val_share: float = 0.1
    block_rows: int = 2048
    max_malformed_share: float = 0.001

    def __post_init__(self) -> None:
        check_number("data.val_share", self.val_share, most=0.99)
        check_number("data.max_malformed_share", self.max_malformed_share, most=1.0)
        check_count("data.block_rows", self.block_rows, least=1, most=MAX_BLOCK_ROWS)

    def paths(self) -> tuple[list[Path], list[Path]]:
        """Return the files for training and the files for validation.

        Raises:
            DataError: a path matches nothing, or a file is named twice.
        """
        key, val = "data.validation_files", self.validation_files
        validation = find_files(key, val) if val else []
        named = find_files("data.files", self.files)
        held_out = {path.resolve() for path in validation}
        train = [path for path in named if path.resolve() not in held_out]
        if not train:
            raise DataError("data.files has no file that is not in data.validation_files, too")
        return train, validation

    def settings(self) -> dict[str, Any]:
        """Return everything that decides the converted data, except the content of the files."""
        return {
            "schema": self.schema.of_conversion(),
            "val_share": None if self.validation_files else self.val_share,
            "block_rows": self.block_rows,
        }

    def described(self) -> dict[str, Any]:
        """Return the settings, and the names and sizes of the files.

        Raises:
            DataError: a path matches nothing, or a file is named twice.
        """
        train, validation = self.paths()
        return {
            "settings": self.settings(),
            "train_files": names_and_sizes(train),
            "validation_files": names_and_sizes(validation),
        }

    def blocks_beside(self, schema: str) -> Path:
        """Return the folder of blocks beside the file of the schema, one for each source."""
        text = json.dumps(self.described(), sort_keys=True)
        name = hashlib.sha256(text.encode()).hexdigest()[:8]
        return Path(schema).with_suffix(".blocks") / name

    def training_rows(self, train: Sequence[Path]) -> list[int | None]:
        """Return how many of the first rows of each file are for training; None for all."""
        if self.validation_files or not self.val_share:
            return [None] * len(train)
        sizes = [count_rows(path, self.schema) for path in train]
        left = sum(sizes) - int(sum(sizes) * self.val_share + 1e-6)
        starts = [0, *itertools.accumulate(sizes)]
        return [
            None if start + size < left else max(0, left - start)
            for start, size in zip(starts, sizes, strict=False)
        ]


def names_and_sizes(paths: Sequence[Path]) -> list[list[Any]]:
    """Return the name and size of each file, which identify the files that were converted."""
    return [[path.name, path.stat().st_size] for path in paths]
