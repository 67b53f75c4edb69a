"""Generated click logs in Criteo's format, with a signal to learn, for use without Criteo's data.

Columns have as many different ids and about as many missing values as in Criteo's Kaggle set; ids
are Zipf-distributed. A piece of rows depends only on the seed and its number.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from torchrec.datasets.criteo import DEFAULT_CAT_NAMES, DEFAULT_INT_NAMES, DEFAULT_LABEL_NAME

from dlrm_sharded.accesses.zipf import cached_zipf
from dlrm_sharded.datasets.block_reader import BlockReader
from dlrm_sharded.datasets.conversion import is_converted
from dlrm_sharded.datasets.counter_random import Floats, normals, random_bits, stream_key
from dlrm_sharded.datasets.presets import criteo_kaggle
from dlrm_sharded.datasets.table_dataset import TableDataset
from dlrm_sharded.files.errors import check_count, check_path
from dlrm_sharded.files.json_files import replaced_file
from dlrm_sharded.files.user_cache import user_cache

log = logging.getLogger(__name__)

PIECE_ROWS = 1 << 16

_ZIPF_EXPONENT = 1.05
_MISSING_INTS = (0.45, 0, 0.2, 0.2, 0.03, 0.2, 0.04, 0, 0.04, 0.45, 0.04, 0.76, 0.2)
_MISSING_CATS = {2: 0.03, 3: 0.03, 5: 0.12, 11: 0.03, 18: 0.44, 19: 0.44, 21: 0.76, 25: 0.44}

# Terms of the logit: weights of three standardized dense features, and the scale of the effects of
# the ids of four columns. These columns have only hundreds of ids, so that the popular ones are
# frequent enough to be learned. The mean label is about 0.26.
_SIGNAL_INTS = {1: 0.4, 4: 0.3, 7: -0.4}
_SIGNAL_CATS = {0: 0.5, 1: 0.5, 4: 0.5, 7: 0.5}
_BIAS = -1.45


def sample_rows(number: int, num_rows: int, *, seed: int) -> tuple[pl.DataFrame, Floats]:
    """Return rows of the piece with this number in Criteo's columns, and the labels' true logits.

    No model can predict better than these logits.
    """
    draw = np.random.default_rng([seed, number])
    logits = np.full(num_rows, _BIAS)
    columns: dict[str, pl.Series] = {}
    for i, name in enumerate(DEFAULT_INT_NAMES):
        values = np.floor(np.exp(1.0 + 1.5 * draw.standard_normal(num_rows))).astype(int) - (i == 1)
        missing = draw.random(num_rows) < _MISSING_INTS[i]
        logits += _SIGNAL_INTS.get(i, 0) * (np.log1p(np.where(missing, 0, values).clip(0)) - 1.4)
        columns[name] = pl.Series(values).set(pl.Series(missing), None)
    for i, (name, table) in enumerate(zip(DEFAULT_CAT_NAMES, criteo_kaggle(), strict=True)):
        bits = draw.integers(2**64, size=num_rows, dtype=np.uint64)
        ranks = cached_zipf(table.num_embeddings, _ZIPF_EXPONENT).ranks(bits).astype(np.uint64)
        logits += _SIGNAL_CATS.get(i, 0) * normals(stream_key(seed, "effect", i), ranks)
        digits = (
            (random_bits(stream_key("id", i), ranks) >> np.uint64(32)).astype(">u4").tobytes().hex()
        )
        ids = pl.Series([digits[start : start + 8] for start in range(0, len(digits), 8)])
        missing = draw.random(num_rows) < _MISSING_CATS.get(i, 0)
        columns[name] = ids.set(pl.Series(missing), None)
    labels = draw.random(num_rows) < 1 / (1 + np.exp(-logits))
    return pl.DataFrame({DEFAULT_LABEL_NAME: labels.astype(np.int8), **columns}), logits


class CriteoSampleDataset(TableDataset):
    """A generated log, which is written and, like Criteo's files, converted when first used.

    Args:
        schema: schema of Criteo's files.
        path: folder of the log and of its converted form; None for the user's cache.
        num_rows: number of samples in the log.
        seed: decides the samples.
        options: other arguments of `TableDataset`; `files` and `blocks_dir` are set here.
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
        for number, first in enumerate(range(0, num_rows, PIECE_ROWS)):
            rows, _ = sample_rows(number, min(PIECE_ROWS, num_rows - first), seed=seed)
            rows.write_csv(file, include_header=False, separator="\t")
