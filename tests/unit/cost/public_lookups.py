"""Published times of FBGEMM's lookups, each with the GPU that it was measured on.

They are of the sources whose shapes are exact, on a GPU that is known (`FITTED_SOURCES`), to which
the figures of `cost.gpu_lookups` were fitted. docs/notes/gpus.md has the errors.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from dlrm_sharded.cost.gpu_lookups import gpu_compute
from dlrm_sharded.cost.workload import Workload, workload_of_tables
from dlrm_sharded.hardware.gpus.gpu_specs import GpuSpec, gpu_specs
from dlrm_sharded.plans.tables import NUM_REUSE_BINS, Table

H100, V100 = gpu_specs()["h100_sxm"], gpu_specs()["v100_sxm"]
H100_HBM2E = dataclasses.replace(H100, memory_gb_per_s=2400.0)
"""The H100 that TorchRec's benchmarks name: pull requests 4634 and 4720 state its peak."""


@dataclass(frozen=True, slots=True)
class PublicLookup:
    """One published time.

    Args:
        source: key in `FITTED_SOURCES`.
        ids, unique_ids: ids of a step in one table, and how many of them differ.
        bags: samples in which they are pooled.
        is_backward: whether the time is that of the backward pass.
        is_kernel: whether it is that of the kernel alone, without launches, sort and other work
            on ids.
    """

    source: str
    name: str
    measured_ms: float
    gpu: GpuSpec
    num_tables: int
    num_rows: float
    ids: float
    unique_ids: float
    bags: int
    embedding_dim: int
    is_backward: bool = False
    optimizer: str = "sgd"
    is_kernel: bool = False

    def predicted_ms(self) -> float:
        """Return the time that the prior of the source's GPU predicts."""
        compute = gpu_compute(self.gpu, self.optimizer)
        workload = self._workload()
        sums = workload.by_rank(compute.vectors(workload))
        num_launches = np.zeros(1) if self.is_kernel else np.ones(1)
        predicted = float(compute.times_ms(sums, num_launches)[0, int(self.is_backward)])
        if self.is_kernel and self.is_backward:
            parts = compute.parts_ms(workload)[0][1].sum(axis=0)
            terms = compute.device.terms
            predicted -= sum(parts[terms.index(name)] for name in ("ids", "id_sort_passes"))
        return predicted

    def error(self) -> float:
        """Return the relative error of the prediction."""
        return self.predicted_ms() / self.measured_ms - 1.0

    def backward(self, name: str, measured_ms: float, optimizer: str) -> PublicLookup:
        """Return the backward pass of this lookup."""
        return dataclasses.replace(
            self, name=name, measured_ms=measured_ms, is_backward=True, optimizer=optimizer
        )

    def _workload(self) -> Workload:
        # the reuse that a histogram says is that of its bins; two of them can have any mean
        histogram = np.zeros(NUM_REUSE_BINS)
        uses = self.ids / self.unique_ids
        of_bin = 2.0 ** np.arange(NUM_REUSE_BINS - 1) * 1.5
        edges = np.concatenate([[1.0, 2.0], of_bin[1:]])
        upper = int(np.searchsorted(edges, uses).clip(1, NUM_REUSE_BINS - 1))
        share = (uses - edges[upper - 1]) / (edges[upper] - edges[upper - 1])
        histogram[upper - 1 : upper + 1] = 1 - share, share
        table = Table(
            "t",
            int(self.num_rows),
            self.embedding_dim,
            self.ids / self.bags,
            tuple(histogram.tolist()),
        )
        return workload_of_tables([table] * self.num_tables, self.bags)


def distinct(num_rows: float, draws: float) -> float:
    """Return the expected number of different rows among uniform draws."""
    return num_rows * (1.0 - (1.0 - 1.0 / num_rows) ** draws)


def _recsys_examples() -> Iterable[PublicLookup]:
    """NVIDIA/recsys-examples, commit ccbdb100, corelib/dynamicemb/benchmark/benchmark_results.json.

    10 tables, ids without pooling, Zipf 1.05; forward: mean of the runs with SGD and Adam.
    """
    of = PublicLookup(
        *("recsys-examples", "forward, unpooled", 0.346, H100),
        *(10, 1_677_721, 104_857, 35_028, 104_857, 128),
    )
    yield of
    yield of.backward("backward, unpooled, SGD", 0.6137, "sgd")
    yield of.backward("backward, unpooled, Adam", 1.0048, "adam")


def _torchrec_widths() -> Iterable[PublicLookup]:
    """TorchRec, commit ff8e26e4, pull request 2365: the last series.

    Its script draws the bags of one feature, 262,144 with 9.5 ids on average, and hands them to 4
    tables: 65,536 bags each. The GPU is not named; see `H100_HBM2E`.
    """
    times_ms = (0.1212, 0.1344, 0.1606, 0.1740, 0.3105, 0.6479, 1.4506, 3.3374, 7.0187)
    for i, ms in enumerate(times_ms):
        unique_ids, dim = distinct(1e5, 622_600), 4 * 2**i
        name = f"forward, {dim} columns"
        yield PublicLookup(
            "torchrec 2365", name, ms, H100_HBM2E, 4, 1e5, 622_600, unique_ids, 65_536, dim
        )


def _ml_perf_model() -> Iterable[PublicLookup]:
    """owensgroup/ml_perf_model, commit f891ca6a, exp_gpu_performance_models.ipynb, printed rows.

    Kernels of FBGEMM's predecessor on a V100, 32 tables. Its backward kernel updates the row of
    every id, without sorting: 8.9 GB are read for 16.8 M ids of 512 B.
    """
    for pooling, ms in ((16, 5.1365), (32, 9.8915), (38, 11.538), (64, 19.622), (128, 38.814)):
        ids = 4096.0 * pooling
        name = f"backward kernel, {pooling} ids a bag"
        kernel = PublicLookup("ml_perf_model", name, ms, V100, 32, 5e5, ids, ids, 4096, 128)
        yield dataclasses.replace(kernel, is_backward=True, is_kernel=True)
    rows = ((8, 32, 5.014), (8, 64, 7.531), (8, 128, 20.949), (8, 256, 40.397), (16, 32, 6.676))
    for pooling, dim, us in rows:
        ids = 128.0 * pooling
        name = f"forward kernel, {pooling} ids a bag, {dim} columns"
        unique_ids = distinct(1e3, ids)
        kernel = PublicLookup(
            "ml_perf_model", name, us / 1e3, V100, 32, 1e3, ids, unique_ids, 128, dim
        )
        yield dataclasses.replace(kernel, is_kernel=True)


FITTED_LOOKUPS = (*_recsys_examples(), *_torchrec_widths(), *_ml_perf_model())
FITTED_SOURCES = tuple(dict.fromkeys(lookup.source for lookup in FITTED_LOOKUPS))
