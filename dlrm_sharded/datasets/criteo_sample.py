"""Generated click logs in Criteo's format, with a signal to learn, to be used without its data.

Columns have as many different ids and about as many missing values as in Criteo's Kaggle set; ids
are Zipf-distributed. A row depends on the seed and its number alone.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl
from torchrec.datasets.criteo import DEFAULT_CAT_NAMES, DEFAULT_INT_NAMES, DEFAULT_LABEL_NAME

from dlrm_sharded.accesses.zipf import cached_zipf
from dlrm_sharded.datasets.block_reader import BlockReader
from dlrm_sharded.datasets.conversion import is_converted
from dlrm_sharded.datasets.counter_random import (
    counters,
    normals,
    random_bits,
    stream_key,
    uniforms,
)
from dlrm_sharded.datasets.presets import criteo_kaggle
from dlrm_sharded.datasets.table_dataset import TableDataset
from dlrm_sharded.files.errors import check_count, check_path
from dlrm_sharded.files.json_files import replaced_file
from dlrm_sharded.files.user_cache import user_cache

log = logging.getLogger(__name__)

CHUNK_ROWS = 1 << 16

_ZIPF_EXPONENT = 1.05
_MISSING_INTS = (0.45, 0, 0.2, 0.2, 0.03, 0.2, 0.04, 0, 0.04, 0.45, 0.04, 0.76, 0.2)
_MISSING_CATS = {2: 0.03, 3: 0.03, 5: 0.12, 11: 0.03, 18: 0.44, 19: 0.44, 21: 0.76, 25: 0.44}

# Terms of the logit: weights of three standardized dense features, and the scale of the effects of
# the ids of four columns. These columns have only hundreds of ids, so that the popular ones are
# frequent enough to be learned. The mean label is about 0.26.
_SIGNAL_INTS = {1: 0.4, 4: 0.3, 7: -0.4}
_SIGNAL_CATS = {0: 0.5, 1: 0.5, 4: 0.5, 7: 0.5}
_BIAS = -1.45


@dataclass(frozen=True, slots=True)
class SampleRows:
    """n rows of a log.

    Args:
        labels: [n].
        integers: [13, n].
        no_integer: [13, n], which of the integers are missing.
        ids: [26, n].
        no_id: [26, n], which of the ids are missing.
        logits: [n], the true logits of a label 1; no model can predict better.
    """

    labels: npt.NDArray[np.bool_]
    integers: npt.NDArray[np.int64]
    no_integer: npt.NDArray[np.bool_]
    ids: npt.NDArray[np.uint32]
    no_id: npt.NDArray[np.bool_]
    logits: npt.NDArray[np.float64]


def sample_rows(first: int, num_rows: int, *, seed: int) -> SampleRows:
    """Return the rows first ... first + num_rows - 1."""
    counter = counters(first, num_rows)
    logits = np.full(num_rows, _BIAS)
    integers, no_integer = [], []
    for i, missing_share in enumerate(_MISSING_INTS):
        magnitude = 1.0 + 1.5 * normals(stream_key(seed, "int", i), counter)
        value = np.floor(np.exp(magnitude)).astype(np.int64) - (i == 1)
        missing = uniforms(stream_key(seed, "no int", i), counter) < missing_share
        logits += _SIGNAL_INTS.get(i, 0) * (np.log1p(np.where(missing, 0, value).clip(0)) - 1.4)
        integers.append(value)
        no_integer.append(missing)
    ids, no_id = [], []
    for i, table in enumerate(criteo_kaggle()):
        zipf = cached_zipf(table.num_embeddings, _ZIPF_EXPONENT)
        ranks = zipf.ranks(random_bits(stream_key(seed, "cat", i), counter))
        missing = uniforms(stream_key(seed, "no cat", i), counter) < _MISSING_CATS.get(i, 0)
        effects = normals(stream_key(seed, "effect", i), ranks.astype(np.uint64))
        logits += _SIGNAL_CATS.get(i, 0) * effects
        ids.append(_hashed(ranks, stream_key("id", i)))
        no_id.append(missing)
    uniform = uniforms(stream_key(seed, "label"), counter)
    return SampleRows(
        labels=uniform < 1 / (1 + np.exp(-logits)),
        integers=np.stack(integers),
        no_integer=np.stack(no_integer),
        ids=np.stack(ids),
        no_id=np.stack(no_id),
        logits=logits,
    )


class CriteoSampleDataset(TableDataset):
    """A generated log that is written and converted at its first use, as Criteo's files are.

    Args:
        schema: of Criteo's files.
        path: folder of the log and of its converted form; None for the user's cache.
        num_rows: samples of the log.
        seed: decides the samples.
        options: of `TableDataset`; files and folder of blocks are those of the log.
    """

    def __init__(
        self,
        schema: Mapping[str, Any],
        path: str | Path | None = None,
        *,
        num_rows: int,
        seed: int,
        **options: Any,
    ) -> None:
        check_count("data.num_rows", num_rows, least=1)
        check_count("data.seed", seed, least=0)
        if path is not None:
            check_path("data.path", path)
        folder = Path(path or user_cache() / "criteo_sample") / f"{num_rows}_rows_seed_{seed}"
        self._log, self._num_rows, self._seed = folder / "train.txt", num_rows, seed
        options |= {"files": str(self._log), "blocks_dir": folder / "blocks"}
        super().__init__(schema=schema, **options)

    @functools.cached_property
    def _blocks(self) -> BlockReader:
        if not self._log.exists() and not is_converted(self.blocks_dir):
            log.info(
                "generating %s samples in Criteo's format: %s", f"{self._num_rows:,}", self._log
            )
            write_criteo_sample(self._log, num_rows=self._num_rows, seed=self._seed)
        return super()._blocks


def write_criteo_sample(path: str | Path, *, num_rows: int, seed: int = 0) -> None:
    """Write a TSV without a header, in Criteo's format."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with replaced_file(path) as file:
        for text in _texts(num_rows, seed):
            file.write(text)


def _texts(num_rows: int, seed: int) -> Iterator[bytes]:
    for first in range(0, num_rows, CHUNK_ROWS):
        rows = sample_rows(first, min(CHUNK_ROWS, num_rows - first), seed=seed)
        columns = {DEFAULT_LABEL_NAME: pl.Series(rows.labels.astype(np.int8))}
        for i, name in enumerate(DEFAULT_INT_NAMES):
            columns[name] = _nullable(pl.Series(rows.integers[i]), rows.no_integer[i])
        for i, name in enumerate(DEFAULT_CAT_NAMES):
            columns[name] = _nullable(pl.Series(_hexadecimal(rows.ids[i])), rows.no_id[i])
        text: str = pl.DataFrame(columns).write_csv(include_header=False, separator="\t")
        yield text.encode()


def _nullable(series: pl.Series, missing: npt.NDArray[np.bool_]) -> pl.Series:
    return series.zip_with(pl.Series(~missing), pl.Series([None], dtype=series.dtype))


def _hexadecimal(ids: npt.NDArray[np.uint32]) -> list[str]:
    digits = ids.astype(">u4").tobytes().hex()
    return [digits[start : start + 8] for start in range(0, len(digits), 8)]


def _hashed(ranks: npt.NDArray[np.int64], key: int) -> npt.NDArray[np.uint32]:
    """Map ranks one to one to 32-bit ids that look random."""
    ids = (ranks + key % 2**32).astype(np.uint32)
    for multiplier in (0x85EBCA6B, 0xC2B2AE35):  # the steps of MurmurHash3's finalizer
        ids ^= ids >> np.uint32(16)
        ids *= np.uint32(multiplier)
    return ids ^ (ids >> np.uint32(16))
