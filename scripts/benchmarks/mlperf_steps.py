"""MLPerf's published steps of DLRM-DCNv2, beside what the priors of the GPUs predict.

Dense layers are matrix products, with times that were measured on the GPU, and element-wise work at
the usable memory bandwidth. Plans and overlap are those of NVIDIA's HugeCTR, as far as they can be:

- On several hosts, `hier_auto` of its planner places the tables. On one host its planner splits
  rows over any ranks, which TorchRec does not, so `neuroshard` places what NVIDIA does not
  replicate.
- The all-reduce of dense gradients and the update of dense weights run beside the backward pass of
  the embeddings, and ids are distributed a step ahead (`pybind/model.cpp` and its pipeline, in
  NVIDIA-Merlin/HugeCTR). Nothing else overlaps here.

Nothing is fitted to the steps.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from benchmarks.planners import neuroshard
from dlrm_sharded.cost.exchange_curves import EvenVolumes, ExchangeCurves
from dlrm_sharded.cost.gpu_lookups import STREAM_SHARE
from dlrm_sharded.cost.learned import LearnedCostModel, prior_cost_model
from dlrm_sharded.datasets.presets import mlperf_dcnv2
from dlrm_sharded.hardware.context import RunContext
from dlrm_sharded.hardware.gpus.gpu_specs import GpuSpec, gpu_specs
from dlrm_sharded.hardware.hardware import Hardware
from dlrm_sharded.plans.plan import ShardingPlan
from dlrm_sharded.plans.task import GIB, ShardingTask, Topology
from dlrm_sharded.sharders.baselines.halving import HalvingSharder
from studies.study import Row

MEMORY_BYTES = 56 * GIB
GPUS_OF_HOST = 8

NUM_GPUS_OF_DOMAIN = {"gb200": 64}
"""GPUs that NVLink connects where that is not one host of 8."""

MLPERF_BATCH_SIZES = {8: 55_296, 16: 65_536, 64: 135_168}
"""Global batch sizes of MLPerf's submissions by number of GPUs."""

NUM_REPLICATED = 13
"""Tables that every GPU has in NVIDIA's plan of one host."""

REPLICATED_GIB_ON_HOSTS = 0.0125
"""Size up to which tables are replicated in NVIDIA's plans of several hosts."""


@dataclass(frozen=True, slots=True)
class MlperfStep:
    """A published step of MLPerf Training, DLRM-DCNv2, closed division."""

    gpu: str
    num_gpus: int
    batch_size: int
    measured_ms: float


MLPERF_STEPS = [
    MlperfStep(*step)
    for step in [
        ("a100_sxm_80gb", 8, 55_296, 8.65),
        ("a100_sxm_80gb", 64, 135_168, 5.92),
        ("h100_sxm", 8, 55_296, 4.02),
        ("h100_sxm", 64, 135_168, 2.75),
        ("h100_sxm", 128, 135_168, 1.99),
        ("h200_sxm", 8, 55_296, 3.66),
        ("h200_sxm", 16, 65_536, 4.02),
        ("h200_sxm", 32, 131_200, 4.25),
        ("b200_sxm", 8, 55_296, 2.42),
        ("b200_sxm", 16, 55_296, 2.48),
        ("gb200", 8, 55_296, 2.33),
        ("gb200", 64, 135_168, 1.45),
        ("h100_pcie", 8, 55_296, 12.2),
        ("l40s", 8, 55_296, 23.6),
    ]
]
"""From the result logs at github.com/mlcommons/training_results_v3.0 to v5.0."""

PRODUCT_SAMPLES = (1024, 2048, 4096, 8192)
PRODUCTS_MS = {
    "a100_sxm": (0.864, 1.388, 2.327, 4.205),
    "h100_sxm": (0.264, 0.414, 0.684, 1.222),
    "h200_sxm": (0.252, 0.400, 0.648, 1.215),
    "b200_sxm": (0.183, 0.254, 0.377, 0.672),
    "gb200": (0.171, 0.236, 0.351, 0.621),
    "l40s": (0.613, 1.076, 1.925, 3.814),
}
"""Time of the matrix products of a step in bf16, by `GpuSpec.collectives` and samples of a GPU.

They are sums over the layers of the products of the forward pass, [B, in] x [in, out], and of both
gradients. Each product's time is the median over the inference libraries that NVIDIA's
aiconfigurator measured (commit 095f58a, Apache-2.0, `systems/data/<system>/gemm`), with 3,584
columns, scaled, for 3,456. The layers: three cross layers 3456-512-3456, an over arch
3456-1024-1024-512-256, and 512-256-128 below. Two that are smaller, 13-512 and 256-1, are left out.
"""

DENSE_WEIGHTS = 15.9e6
"""Weights of these layers."""

ELEMENT_PASSES = 37
"""Times that 3,456 numbers of a sample go through memory outside of matrix products.

A cross layer reads x0, its product and x, and writes x (4); backward it reads the gradient, x0, the
product and the gradient of x0, and writes the gradients of the product and of x0 (6), and adds the
gradient that goes on (1). With three layers these are 33; joining the dense vector and the
embeddings, forward and backward, takes 4. Activations are part of matrix products."""

UPDATE_BYTES = 20
"""Bytes of a weight that an update reads and writes: weight and state in fp32, gradient and weight
in fp16."""

HALF_BYTES = 2


def steps(num: int | None) -> Iterator[tuple[str, Callable[[], Row]]]:
    """Yield a name and a row for each published step, or for the first ones."""
    for step in MLPERF_STEPS[:num]:
        key = f"{step.num_gpus} {step.gpu} {step.batch_size}"
        yield key, functools.partial(predicted_step, step)


def predicted_step(step: MlperfStep) -> Row:
    """Predict a step of HugeCTR with fp16 exchanges and its smallest tables on every GPU."""
    spec = gpu_specs()[step.gpu]
    task = mlperf_task(step.num_gpus, step.batch_size, spec)
    # HugeCTR exchanges vectors of half the size: as if links had twice the bandwidth
    halves = dataclasses.replace(
        task.topology,
        intra_host_bytes_per_s=2e9 * spec.link_gb_per_s,
        inter_host_bytes_per_s=2e9 * spec.adapter_gb_per_s,
    )
    halved = dataclasses.replace(task, topology=halves)
    model = prior_model(spec)
    slowest = max(
        model.predict(_nvidias_plan(halved, model), halved).per_rank,
        key=lambda stages: stages.total_ms,
    )
    assert model.exchange_curves is not None
    layers_ms = _layers_ms(spec, task.batch_size / step.num_gpus)
    updates_ms = _updates_ms(spec, task, model.exchange_curves)
    backward_ms = slowest.bwd_comm_ms + slowest.bwd_compute_ms
    dense_ms = layers_ms + max(updates_ms - backward_ms, 0.0)
    predicted_ms = dense_ms + slowest.total_ms
    return dataclasses.asdict(step) | {
        "predicted_ms": predicted_ms,
        "error": predicted_ms / step.measured_ms - 1,
        "dense_ms": dense_ms,
        "lookups_ms": slowest.computation_ms,
        "exchanges_ms": slowest.exchange_ms,
    }


def _nvidias_plan(task: ShardingTask, model: LearnedCostModel) -> ShardingPlan:
    """Return a plan like NVIDIA's: of its planner, or of `neuroshard` on one host."""
    if task.topology.world_size == task.topology.ranks_per_host:
        return neuroshard(model, replicate=_smallest(task)).shard(task)
    planner = HalvingSharder(
        "hugectr", strategy="hier_auto", replicate_below_gib=REPLICATED_GIB_ON_HOSTS
    )
    return planner.shard(task)


def _layers_ms(spec: GpuSpec, num_samples: float) -> float:
    """Return the time of dense layers: matrix products and element-wise work."""
    element_bytes = ELEMENT_PASSES * 3456 * HALF_BYTES * num_samples
    return _products_ms(spec, num_samples) + element_bytes / _bytes_per_ms(spec)


def _updates_ms(spec: GpuSpec, task: ShardingTask, curves: ExchangeCurves) -> float:
    """Return the time of the all-reduce of dense gradients, and of the update."""
    volume = DENSE_WEIGHTS * HALF_BYTES / task.topology.world_size
    even = EvenVolumes.of_task(task)
    reduce_ms = sum(curves.ring_ms(half, volume, even) for half in ("reduce_scatter", "all_gather"))
    return reduce_ms + UPDATE_BYTES * DENSE_WEIGHTS / _bytes_per_ms(spec)


def _bytes_per_ms(spec: GpuSpec) -> float:
    return STREAM_SHARE * spec.memory_gb_per_s * 1e6


def _products_ms(spec: GpuSpec, num_samples: float) -> float:
    """Return the time of matrix products; a GPU without measurements has an H100's by its peak."""
    measured = spec if spec.collectives in PRODUCTS_MS else gpu_specs()["h100_sxm"]
    assert measured.collectives is not None
    assert measured.bf16_tflops is not None
    assert spec.bf16_tflops is not None
    times_ms = PRODUCTS_MS[measured.collectives]
    ms = float(np.interp(num_samples, PRODUCT_SAMPLES, times_ms))
    return ms * measured.bf16_tflops / spec.bf16_tflops


def mlperf_task(num_gpus: int, batch_size: int, spec: GpuSpec) -> ShardingTask:
    """Return MLPerf's tables on hosts of 8 GPUs."""
    topology = Topology(
        num_gpus,
        MEMORY_BYTES,
        local_world_size=min(num_gpus, NUM_GPUS_OF_DOMAIN.get(spec.key, GPUS_OF_HOST)),
        optimizer_bytes_per_row=4,
    )
    return ShardingTask(mlperf_dcnv2(), topology, batch_size)


def prior_model(spec: GpuSpec) -> LearnedCostModel:
    """Return the prior of a GPU as a cost model."""
    return prior_cost_model(RunContext("cuda", Hardware(spec.device_name)))


def _smallest(task: ShardingTask) -> list[str]:
    """Return the tables that NVIDIA's plan replicates, which are the smallest ones."""
    by_size = sorted(task.tables, key=lambda table: table.num_embeddings * table.embedding_dim)
    return [table.name for table in by_size[:NUM_REPLICATED]]
