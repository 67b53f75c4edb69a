"""One embedding table, and what its accesses look like in a batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dlrm_sharded.errors import ConfigError

COLUMN_MULTIPLE = 4
"""FBGEMM's fused lookup loads 16 bytes at a time: widths are multiples of 4 fp32 columns."""

NUM_REUSE_BINS = 17
"""Ids of a batch by how often it uses them: (0, 1], (1, 2], (2, 4], ... (32768, inf)."""


@dataclass(frozen=True, slots=True)
class Table:
    """`num_embeddings` x `embedding_dim` weights, pooled over `pooling_factor` ids per sample.

    Args:
        reuse_histogram: share of a batch's unique ids in each of the 17 reuse bins
            (`NUM_REUSE_BINS`), as NeuroShard (arXiv:2305.01868) describes access skew;
            None where it was not measured.
    """

    name: str
    num_embeddings: int
    embedding_dim: int
    pooling_factor: float
    reuse_histogram: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        where = f"table {self.name!r}"
        if not self.name:
            raise ConfigError("a table has an empty name; give every table a name of its own")
        if self.num_embeddings < 1:
            raise ConfigError(f"{where}: num_embeddings is {self.num_embeddings:,}, must be >= 1")
        if self.embedding_dim < 1 or self.embedding_dim % COLUMN_MULTIPLE:
            raise ConfigError(
                f"{where}: embedding_dim is {self.embedding_dim}; FBGEMM's fused lookup needs a "
                f"positive multiple of {COLUMN_MULTIPLE}"
            )
        if not 0 <= self.pooling_factor < float("inf"):
            raise ConfigError(
                f"{where}: pooling_factor is {self.pooling_factor}, must be finite and >= 0"
            )
        if self.reuse_histogram is not None and len(self.reuse_histogram) != NUM_REUSE_BINS:
            raise ConfigError(
                f"{where}: reuse_histogram has {len(self.reuse_histogram)} bins, "
                f"must have {NUM_REUSE_BINS}"
            )

    def to_json(self) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "name": self.name,
            "num_embeddings": self.num_embeddings,
            "embedding_dim": self.embedding_dim,
            "pooling_factor": self.pooling_factor,
        }
        if self.reuse_histogram is not None:
            fields["reuse_histogram"] = list(self.reuse_histogram)
        return fields

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Table:
        unknown = set(fields) - {field.name for field in dataclasses.fields(cls)}
        if unknown:
            raise ConfigError(f"a table has the unknown keys {sorted(unknown)}: {dict(fields)}")
        histogram = fields.get("reuse_histogram")
        return cls(
            name=str(fields["name"]),
            num_embeddings=int(fields["num_embeddings"]),
            embedding_dim=int(fields["embedding_dim"]),
            pooling_factor=float(fields["pooling_factor"]),
            reuse_histogram=None if histogram is None else tuple(float(x) for x in histogram),
        )
