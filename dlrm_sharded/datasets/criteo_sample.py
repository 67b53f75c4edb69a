"""Made-up click logs in Criteo's format, with a signal to learn: for tests, demos and benchmarks.

Column sizes are those of Criteo's Kaggle set and missing values about as frequent as there; the
popularity of ids is Zipf-distributed. A sample depends on the seed and its row number alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import polars as pl
from torchrec.datasets.criteo import DEFAULT_CAT_NAMES, DEFAULT_INT_NAMES, DEFAULT_LABEL_NAME

from dlrm_sharded.datasets.counter_random import normals, places, random_bits, stream_key, uniforms
from dlrm_sharded.datasets.presets import criteo_kaggle
from dlrm_sharded.zipf import cached_zipf

CHUNK_ROWS = 1 << 16

_ZIPF_EXPONENT = 1.05
_MISSING_INTS = (0.45, 0, 0.2, 0.2, 0.03, 0.2, 0.04, 0, 0.04, 0.45, 0.04, 0.76, 0.2)
_MISSING_CATS = {2: 0.03, 3: 0.03, 5: 0.12, 11: 0.03, 18: 0.44, 19: 0.44, 21: 0.76, 25: 0.44}

# The logit: weights of three standardised dense features, and effects of the ids of four columns
# of some hundred ids each, so that the popular ones come often. The mean label is about 0.26.
_SIGNAL_INTS = {1: 0.4, 4: 0.3, 7: -0.4}
_SIGNAL_CATS = {0: 0.5, 1: 0.5, 4: 0.5, 7: 0.5}
_BIAS = -1.45


@dataclass(frozen=True, slots=True)
class SampleRows:
    """n rows: labels [n], integers [13, n], ids [26, n], and where the last two are missing.

    Args:
        logits: [n], of the probability of a label 1; no model can do better.
    """

    labels: npt.NDArray[np.bool_]
    integers: npt.NDArray[np.int64]
    no_integer: npt.NDArray[np.bool_]
    ids: npt.NDArray[np.uint32]
    no_id: npt.NDArray[np.bool_]
    logits: npt.NDArray[np.float64]


def sample_rows(first: int, num_rows: int, *, seed: int) -> SampleRows:
    """Rows first ... first + num_rows - 1."""
    place = places(first, num_rows)
    logits = np.full(num_rows, _BIAS)
    integers, no_integer = [], []
    for i, missing_share in enumerate(_MISSING_INTS):
        magnitude = 1.0 + 1.5 * normals(stream_key(seed, "int", i), place)
        value = np.floor(np.exp(magnitude)).astype(np.int64) - (i == 1)
        missing = uniforms(stream_key(seed, "no int", i), place) < missing_share
        logits += _SIGNAL_INTS.get(i, 0) * (np.log1p(np.where(missing, 0, value).clip(0)) - 1.4)
        integers.append(value)
        no_integer.append(missing)
    ids, no_id = [], []
    for i, table in enumerate(criteo_kaggle()):
        zipf = cached_zipf(table.num_embeddings, _ZIPF_EXPONENT)
        ranks = zipf.ranks(random_bits(stream_key(seed, "cat", i), place))
        missing = uniforms(stream_key(seed, "no cat", i), place) < _MISSING_CATS.get(i, 0)
        effects = normals(stream_key(seed, "effect", i), ranks.astype(np.uint64))
        logits += _SIGNAL_CATS.get(i, 0) * effects
        ids.append(_hashed(ranks, stream_key("id", i)))
        no_id.append(missing)
    chance = uniforms(stream_key(seed, "label"), place)
    return SampleRows(
        labels=chance < 1 / (1 + np.exp(-logits)),
        integers=np.stack(integers),
        no_integer=np.stack(no_integer),
        ids=np.stack(ids),
        no_id=np.stack(no_id),
        logits=logits,
    )


def write_criteo_sample(path: Path, *, num_rows: int, seed: int = 0) -> None:
    """Write a TSV without a header, as Criteo's."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
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
    """A one-to-one map to 32-bit ids that look random."""
    ids = (ranks + key % 2**32).astype(np.uint32)
    for multiplier in (0x85EBCA6B, 0xC2B2AE35):  # the steps of MurmurHash3's finaliser
        ids ^= ids >> np.uint32(16)
        ids *= np.uint32(multiplier)
    return ids ^ (ids >> np.uint32(16))
