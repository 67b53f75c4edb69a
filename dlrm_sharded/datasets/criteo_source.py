"""Settings of the conversion of Criteo files."""

from __future__ import annotations

import glob
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torchrec.datasets.criteo import DEFAULT_CAT_NAMES

from dlrm_sharded.files.errors import ConfigError, DataError, check_count, check_number, check_path

_MAX_ROWS = 2**31 - 2
_MAX_BLOCK_ROWS = 2**24


@dataclass(frozen=True, slots=True)
class CriteoSource:
    """TSVs to convert, and the settings of their conversion.

    Args:
        files: paths or globs, plain or gzip; the matches of a glob are read in natural order.
        val_files: files for validation; they are not used for training if `files` matches them too.
        val_share: share of all rows, from the end, for validation if there are no `val_files`.
        id_mapping: "vocabulary" gives each id a row; "hash" takes it modulo `max_ind_range`.
        min_count: ids that are rarer than this in training share a row (vocabulary only).
        max_ind_range: ids are taken modulo this; one number, or one per categorical column. With a
            vocabulary a table has at most one row more.
        block_rows: samples per block; serving is fastest for batches of this size.
        max_malformed_share: more malformed lines than this share of a file's lines are an error.
    """

    files: str | Sequence[str]
    val_files: str | Sequence[str] = ()
    val_share: float = 1 / 7
    id_mapping: Literal["vocabulary", "hash"] = "vocabulary"
    min_count: int = 3
    max_ind_range: int | Sequence[int] | None = None
    block_rows: int = 2048
    max_malformed_share: float = 0.001

    def __post_init__(self) -> None:
        for key in ("files", "val_files"):
            _check_paths(key, getattr(self, key))
        check_number("val_share", self.val_share, most=1.0)
        if self.val_share == 1:
            raise ConfigError("val_share is 1, must be in [0, 1): training needs data too")
        check_number("max_malformed_share", self.max_malformed_share, most=1.0)
        if self.id_mapping not in ("vocabulary", "hash"):
            raise ConfigError(f"id_mapping is {self.id_mapping!r}, must be vocabulary or hash")
        check_count("min_count", self.min_count, least=1)
        check_count("block_rows", self.block_rows, least=1, most=_MAX_BLOCK_ROWS)
        if self.id_mapping == "hash" and self.max_ind_range is None:
            raise ConfigError("id_mapping=hash needs max_ind_range, the rows of each table")
        if not _are_caps(self.max_ind_range):
            raise ConfigError(
                f"max_ind_range is {self.max_ind_range}, must be one number or "
                f"{len(DEFAULT_CAT_NAMES)}, each in [1, {_MAX_ROWS:,}]"
            )

    @property
    def caps(self) -> tuple[int, ...] | None:
        """`max_ind_range` for each of the 26 columns; None without any."""
        if self.max_ind_range is None:
            return None
        if isinstance(self.max_ind_range, int):
            return (self.max_ind_range,) * len(DEFAULT_CAT_NAMES)
        return tuple(self.max_ind_range)

    def paths(self) -> tuple[list[Path], list[Path]]:
        """Return the files for training and those for validation.

        Raises:
            DataError: a path or glob matches nothing, or a file is given twice.
        """
        val = _matches(self.val_files)
        train = [path for path in _matches(self.files) if path not in val]
        without_gz = [str(path).removesuffix(".gz") for path in (*train, *val)]
        twice = sorted({name for name in without_gz if without_gz.count(name) > 1})
        if twice:
            raise DataError(
                f"{twice[0]} is named twice (maybe plain and as .gz) by files and val_files; "
                "name each file once"
            )
        if not train:
            raise ConfigError("files has no file for training that is not in val_files too")
        return train, val

    def settings(self) -> dict[str, Any]:
        """Return everything that decides the converted data, except the content of the files."""
        caps = self.caps
        return {
            "val_share": None if self.val_files else self.val_share,
            "id_mapping": self.id_mapping,
            "min_count": self.min_count if self.id_mapping == "vocabulary" else None,
            "max_ind_range": None if caps is None else list(caps),
            "block_rows": self.block_rows,
        }


def _check_paths(key: str, paths: object) -> None:
    """Raise ConfigError unless a value is a path, or a list of paths."""
    if isinstance(paths, str) or not isinstance(paths, Sequence):
        paths = [paths]
    for path in paths:
        check_path(key, path)


def _are_caps(caps: object) -> bool:
    """Return whether a value can be `max_ind_range`."""
    if caps is None:
        return True
    if not isinstance(caps, Sequence) or isinstance(caps, str):
        caps = [caps]
    are_counts = all(type(cap) is int and 1 <= cap <= _MAX_ROWS for cap in caps)
    return are_counts and len(caps) in (1, len(DEFAULT_CAT_NAMES))


def names_and_sizes(paths: Sequence[Path]) -> list[list[Any]]:
    """Return name and size of each file, which identify the files that were converted."""
    return [[path.name, path.stat().st_size] for path in paths]


def _matches(patterns: str | Sequence[str]) -> list[Path]:
    matches: dict[Path, None] = {}
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        paths = sorted(map(Path, glob.glob(pattern)), key=_natural)  # noqa: PTH207 (absolute too)
        if not paths:
            where = Path(pattern).absolute()
            raise DataError(f"{where} does not exist or matches no file; correct files, val_files")
        matches.update(dict.fromkeys(paths))
    return list(matches)


def _natural(path: Path) -> list[tuple[int, str]]:
    """Return a sorting key that puts day_2 before day_10."""
    parts = re.split(r"(\d+)", str(path))
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in parts]
