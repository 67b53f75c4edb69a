"""Embedding tables and their access profiles."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass

from dlrm_sharded.files.errors import ConfigError, check_choice, check_count, check_number
from dlrm_sharded.files.json_forms import NOT_IN_JSON, Number, make_plain
from dlrm_sharded.plans.precision import TABLE_BYTES

COLUMN_MULTIPLE = 4
"""Widths are multiples of this: FBGEMM's lookup loads 16 bytes, or four fp32 columns, at a time."""

MAX_ROWS, MAX_COLUMNS, MAX_POOLING_FACTOR, MAX_FEATURES = 2**40, 2**14, 1e9, 10_000
"""Limits beyond any real table, below which sums of sizes are exact in 64 bits."""

MAX_SHARD_COLUMNS = {"cpu": MAX_COLUMNS, "cuda": 2**11}
"""Largest width of a shard by compute device: FBGEMM's kernels check `max_D <= 2048` at the first
lookup (`max_embedding_dim` of its code generator)."""

LAYOUTS = frozenset({"columns", "rows", "host_rows", "replicas"})
"""Layouts of a table that is not one whole shard: column shards, row blocks on all ranks or on the
ranks of one host, or a replica on every rank."""

NUM_REUSE_BINS = 17
"""Number of bins of a batch's unique ids, by uses: (0, 1], (1, 2], (2, 4], ... (32768, inf)."""

HISTOGRAM_SLACK = 0.01
"""How far the sum of a histogram may be from 1, because its shares are rounded."""


@dataclass(frozen=True, slots=True)
class Table:
    """`num_embeddings` x `embedding_dim` weights, in which a sample looks up `pooling_factor` ids.

    Args:
        pooling_factor: mean number of ids that a sample looks up, over all features together.
        reuse_histogram: fraction of a batch's unique ids in each of the 17 reuse bins
            (`NUM_REUSE_BINS`), as NeuroShard (arXiv:2305.01868) describes access skew;
            None if it was not measured.
        precision: of the weights, one of `precision.TABLE_BYTES`, which sharders keep.
        num_features: features that look up the table; each has a pooled vector of its own.
        pooled: whether the vectors of a sample's ids are pooled, into one for each feature; those
            of a sequence (TorchRec's `EmbeddingCollection`) are not.
        module: path, in the model, of the module that has the table. Tables of one module share
            lookups and exchanges; each module launches its own.
        layouts: the `LAYOUTS` that sharders may choose besides the whole table; all of them,
            unless a model's module trains fewer. A task.json does not have them.
        features: names of the features that look up the table, `num_features` of them; () if they
            have no names, or if the only one is named like the table. A task.json does not have
            them.

    Raises:
        ConfigError: a value is out of range or of the wrong kind.
    """

    name: str
    num_embeddings: int
    embedding_dim: int
    pooling_factor: Number
    reuse_histogram: tuple[Number, ...] | None = None
    precision: str = "fp32"
    num_features: int = 1
    pooled: bool = True
    module: str = ""
    layouts: frozenset[str] = dataclasses.field(default=LAYOUTS, metadata=NOT_IN_JSON)
    features: tuple[str, ...] = dataclasses.field(default=(), metadata=NOT_IN_JSON)

    def __post_init__(self) -> None:
        make_plain(self)
        if (
            not isinstance(self.name, str)
            or not self.name.isprintable()
            or not self.name.strip(". ")
        ):
            raise ConfigError(
                f"a table is named {self.name!r}; a name needs more than dots and spaces, and must "
                "have no control characters"
            )
        where = f"table {self.name!r}"
        check_count(f"{where}: num_embeddings", self.num_embeddings, least=1, most=MAX_ROWS)
        check_count(f"{where}: embedding_dim", self.embedding_dim, least=4, most=MAX_COLUMNS)
        if self.embedding_dim % COLUMN_MULTIPLE:
            raise ConfigError(
                f"{where}: embedding_dim is {self.embedding_dim}; FBGEMM's fused lookup needs a "
                f"multiple of {COLUMN_MULTIPLE}"
            )
        check_number(f"{where}: pooling_factor", self.pooling_factor, most=MAX_POOLING_FACTOR)
        check_count(f"{where}: num_features", self.num_features, least=1, most=MAX_FEATURES)
        if self.features and len(set(self.features)) != self.num_features:
            raise ConfigError(
                f"{where}: num_features is {self.num_features}; it must be the number of the "
                f"features {list(self.features)}, whose names must differ"
            )
        check_choice(f"{where}: precision", self.precision, TABLE_BYTES)
        if self.reuse_histogram is not None:
            if len(self.reuse_histogram) != NUM_REUSE_BINS:
                raise ConfigError(
                    f"{where}: reuse_histogram has {len(self.reuse_histogram)} bins, "
                    f"must have {NUM_REUSE_BINS}"
                )
            for share in self.reuse_histogram:
                check_number(f"{where}: a share of reuse_histogram", share, most=1.000001)
            total = sum(self.reuse_histogram)
            if abs(total - 1) > HISTOGRAM_SLACK and (total or self.pooling_factor):
                raise ConfigError(f"{where}: reuse_histogram sums to {total:g}; it must sum to 1")

    @property
    def feature_names(self) -> tuple[str, ...]:
        """Names of the features of a dataset that look up the table."""
        return self.features or (self.name,)

    @property
    def vectors_per_sample(self) -> float:
        """Mean number of vectors that a sample gets: one for each feature, or one for each id."""
        return float(self.num_features if self.pooled else self.pooling_factor)


def tables_by_feature(tables: Iterable[Table]) -> dict[str, Table]:
    """Return the table of each feature, in the order of the tables."""
    return {feature: table for table in tables for feature in table.feature_names}
