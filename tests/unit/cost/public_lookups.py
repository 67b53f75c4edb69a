"""Published times of FBGEMM's lookups, and what the prior of an H100 says of the same lookups."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from dlrm_sharded.cost.gpu_lookups import gpu_compute
from dlrm_sharded.cost.workload import Workload, workload_of_rows
from dlrm_sharded.hardware.gpus.gpu_specs import gpu_specs
from dlrm_sharded.plans.tables import NUM_REUSE_BINS


@dataclass(frozen=True, slots=True)
class PublicLookup:
    """One published time.

    Args:
        ids, unique_ids: ids of a step in one table, and how many of them differ.
        bags: samples in which they are pooled.
        is_backward: whether the time is that of the backward pass.
    """

    name: str
    measured_ms: float
    num_tables: int
    num_rows: float
    ids: float
    unique_ids: float
    bags: int
    embedding_dim: int
    is_backward: bool = False
    optimizer: str = "sgd"

    def predicted_ms(self) -> float:
        """Return the time that the prior of an H100 predicts."""
        compute = gpu_compute(gpu_specs()["h100_sxm"], self.optimizer)
        workload = self._workload()
        sums = workload.by_rank(compute.vectors(workload))
        return float(compute.times_ms(sums, np.ones(1))[0, int(self.is_backward)])

    def backward(self, name: str, measured_ms: float, optimizer: str) -> PublicLookup:
        """Return the backward pass of this lookup."""
        return dataclasses.replace(
            self, name=name, measured_ms=measured_ms, is_backward=True, optimizer=optimizer
        )

    def _workload(self) -> Workload:
        row = (0, 1, self.num_rows, self.embedding_dim, self.ids)
        # the reuse that a histogram says is that of its bins; two of them can have any mean
        histogram = np.zeros(NUM_REUSE_BINS)
        uses = self.ids / self.unique_ids
        of_bin = 2.0 ** np.arange(NUM_REUSE_BINS - 1) * 1.5
        edges = np.concatenate([[1.0, 2.0], of_bin[1:]])
        upper = int(np.searchsorted(edges, uses).clip(1, NUM_REUSE_BINS - 1))
        share = (uses - edges[upper - 1]) / (edges[upper] - edges[upper - 1])
        histogram[upper - 1 : upper + 1] = 1 - share, share
        histograms = [tuple(histogram.tolist())] * self.num_tables
        return workload_of_rows(1, 1, self.bags, [row] * self.num_tables, histograms)


_BY_DIM = dict(
    zip(
        (2**i for i in range(2, 11)),
        (0.121, 0.134, 0.161, 0.174, 0.310, 0.648, 1.451, 3.337, 7.019),
        strict=True,
    )
)
_UNPOOLED = PublicLookup("forward, unpooled", 0.345, 10, 1e6, 105e3, 35e3, 105_000, 128)
_PRODUCTION_IDS = 20e6
_PRODUCTION = PublicLookup(
    "forward, production",
    _PRODUCTION_IDS * 512 / (0.647 * 3350e6),
    num_tables=20,
    num_rows=1e7,
    ids=_PRODUCTION_IDS / 20,
    unique_ids=_PRODUCTION_IDS / 40,
    bags=65_536,
    embedding_dim=128,
    optimizer="rowwise_adagrad",
)

PUBLIC_LOOKUPS = [
    # torchrec issue 2365, GPU not named; 4 tables of 100,000 rows, samples not stated
    *(
        PublicLookup(f"forward, {dim} columns", ms, 4, 1e5, 650e3, 1e5, 32_768, dim)
        for dim, ms in _BY_DIM.items()
    ),
    # NVIDIA/recsys-examples, benchmark_results.json, H100
    _UNPOOLED,
    _UNPOOLED.backward("backward, unpooled, SGD", 0.614, "sgd"),
    _UNPOOLED.backward("backward, unpooled, Adam", 1.005, "adam"),
    # torchrec issue 4757: 64.7 % of the peak, and 4.9 times as long; its shapes are assumed
    _PRODUCTION,
    _PRODUCTION.backward("backward, production", 4.9 * _PRODUCTION.measured_ms, "rowwise_adagrad"),
]
"""Where a source does not state a figure, a usual one is assumed, as the comments say."""
