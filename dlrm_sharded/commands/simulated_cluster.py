"""Builds what the config of a simulation describes: the task, the device and the dense part."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from typing import Any

import torch
from omegaconf import DictConfig

from dlrm_sharded.commands.hydra_app import instantiate
from dlrm_sharded.commands.sharders import run_context
from dlrm_sharded.commands.step_model import NUM_DENSE, build_dense, overlap_of
from dlrm_sharded.commands.task import HERE, asked_task, check_hosts, check_question
from dlrm_sharded.datasets.base import BatchStream, Dataset
from dlrm_sharded.datasets.read_batches import read_batches
from dlrm_sharded.dense.model import DenseModel
from dlrm_sharded.files.errors import ConfigError, check_count, check_number
from dlrm_sharded.hardware.context import RunContext
from dlrm_sharded.hardware.gpus.gpu_specs import GpuSpec, named_gpu_spec
from dlrm_sharded.measuring.measure import MeasureConfig
from dlrm_sharded.model.optimizers import OptimizerConfig
from dlrm_sharded.plans.task import GIB, ShardingTask, Topology
from dlrm_sharded.ranks.devices import device_type
from dlrm_sharded.ranks.process import num_cores
from dlrm_sharded.step.core_sharing import CoreSharing
from dlrm_sharded.step.parts import DenseTimes
from dlrm_sharded.step.schedule import Overlap
from dlrm_sharded.training.memory import Workload

LOCAL_BATCH_SIZE = 512
"""Samples of a rank if no batch size is stated."""

TABLE_SHARE = 0.5
"""Share of this machine's memory for one rank's tables."""

MAX_NEIGHBORS = 256


@dataclass(frozen=True, slots=True)
class SimulatedCluster:
    """The cluster to simulate, and the device that stands in for it.

    Args:
        dataset: None for a task.json.
        gpu: GPU whose prior prices the lookups; None if they are measured here.
        device: device at hand.
        optimizer: config of the optimizer.
        table_limit_bytes: memory for one rank's tables in a measurement.
        num_neighbors: processes that compute beside a measurement.
        sharing: the cores that the ranks of a host share; None if each has its own.
        notes: sentences on what differs from what was asked for.
    """

    task: ShardingTask
    dataset: Dataset | None
    context: RunContext
    gpu: GpuSpec | None
    device: torch.device
    dense: DenseModel
    optimizer: DictConfig
    measure: MeasureConfig
    overlap: Overlap
    table_limit_bytes: int
    num_neighbors: int = 0
    sharing: CoreSharing | None = None
    notes: tuple[str, ...] = ()

    @property
    def local_batch_size(self) -> int:
        return self.task.batch_size // self.task.topology.world_size


def build_cluster(cfg: DictConfig) -> SimulatedCluster:
    """Build what a config describes.

    Raises:
        ConfigError: a value cannot be used.
        DataError: the data cannot be read.
    """
    gpu = None if cfg.hardware == HERE else named_gpu_spec(cfg.hardware, key="hardware")
    at_hand = "cpu" if gpu else device_type()
    compute_device = "cuda" if gpu else at_hand
    cfg, notes = _with_topology(cfg, compute_device, gpu)
    asked = asked_task(cfg, "simulate")
    notes += [] if asked.note is None else [asked.note]
    optimizer: OptimizerConfig = instantiate(asked.optimizer)
    optimizer.check_device(torch.device(compute_device))
    task = asked.task
    if gpu is None:
        task = _on_device(task, compute_device, notes)
    device = torch.device(at_hand)
    num_dense = NUM_DENSE if asked.dataset is None else asked.dataset.num_dense
    return SimulatedCluster(
        task=task,
        dataset=asked.dataset,
        context=run_context(cfg.hardware, task, optimizer.embedding),
        gpu=gpu,
        device=device,
        dense=build_dense(cfg, num_dense, optimizer),
        optimizer=asked.optimizer,
        measure=instantiate(cfg.measure),
        overlap=overlap_of(cfg.overlap, compute_device),
        table_limit_bytes=_table_limit(cfg.table_gib, device),
        num_neighbors=_num_neighbors(cfg.neighbors, task.topology),
        sharing=_core_sharing(cfg.host_cores, task.topology),
        notes=tuple(notes),
    )


def _on_device(task: ShardingTask, compute_device: str, notes: list[str]) -> ShardingTask:
    """Return the task for the device at hand, and note that if it is for another one."""
    topology = task.topology
    if topology.compute_device == compute_device:
        return task
    notes.append(
        f"the task is for ranks on {topology.compute_device}; the device at hand is a "
        f"{compute_device}, so the ranks of the simulation compute on that"
    )
    topology = dataclasses.replace(topology, compute_device=compute_device)
    return dataclasses.replace(task, topology=topology)


def _with_topology(
    cfg: DictConfig, compute_device: str, gpu: GpuSpec | None
) -> tuple[DictConfig, list[str]]:
    """Return the config with the ranks and the batch of data that it leaves open, and notes."""
    check_question(cfg, "simulate")
    if cfg.task is not None:
        return cfg, []
    cfg, notes = cfg.copy(), []
    topology = cfg.topology
    check_hosts(topology)
    if topology.compute_device is None:
        topology.compute_device = compute_device
    if topology.compute_device != compute_device:
        raise ConfigError(
            f"topology.compute_device is {topology.compute_device!r}, and hardware = "
            f"{cfg.hardware} is a {compute_device}; leave topology.compute_device out"
        )
    if topology.memory_gib is None:
        if gpu is not None:
            raise ConfigError(
                "topology.memory_gib is not set; name the memory of one GPU for tables in GiB, or "
                "topology=h100_80gb or a100_80gb"
            )
        check_number("topology.memory_fraction", topology.memory_fraction, most=1.0, above=True)
        sharing = 1 if compute_device == "cuda" else topology.ranks_per_host or topology.world_size
        gib = topology.memory_fraction * _total_bytes(torch.device(compute_device)) / sharing / GIB
        topology.memory_gib = max(0.01, round(gib, 2))
        notes.append(
            f"topology.memory_gib is not set: every rank has {topology.memory_gib:g} GiB for "
            "tables, as on hosts like this machine"
        )
    if cfg.batch_size is None:
        cfg.batch_size = LOCAL_BATCH_SIZE * topology.world_size
    return cfg, notes


def _total_bytes(device: torch.device) -> int:
    """Return the memory of a GPU or of this machine; unlike the free memory, it never changes."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _table_limit(table_gib: Any, device: torch.device) -> int:
    if table_gib is None:
        return int(TABLE_SHARE * _total_bytes(device))
    check_number("table_gib", table_gib, above=True, most=2**20)
    return int(table_gib * GIB)


def _num_neighbors(value: Any, topology: Topology) -> int:
    """Return the number of processes that compute beside a measurement."""
    if value != "auto":
        check_count("neighbors (a number, or auto)", value, least=0, most=MAX_NEIGHBORS)
        return int(value)
    if topology.compute_device != "cpu":
        return 0
    ranks_at_once = num_cores() // torch.get_num_threads()
    return max(0, min(topology.ranks_per_host, ranks_at_once) - 1)


def _core_sharing(host_cores: Any, topology: Topology) -> CoreSharing | None:
    """Return how ranks share the cores of their host; None if the host has enough of them."""
    if host_cores is None:
        return None
    check_count("host_cores", host_cores, least=1)
    if topology.compute_device != "cpu":
        raise ConfigError("host_cores is set, and the ranks compute on GPUs; leave it out")
    ranks_at_once = host_cores / torch.get_num_threads()
    if ranks_at_once >= topology.ranks_per_host:
        return None
    return CoreSharing(topology.ranks_per_host, ranks_at_once)


def memory_workload(cluster: SimulatedCluster) -> Workload:
    """Return what a run needs memory for, besides its tables; batches are not kept."""
    dense = cluster.dense.trace(cluster.task.tables, cluster.local_batch_size)
    return Workload(
        dense=dense,
        dense_state_bytes=cluster.dense.state_tensors * dense.parameter_bytes,
        num_dense=cluster.dense.num_dense,
        num_measured_batches=0,
        num_eval_samples=0,
    )


def dense_times(cluster: SimulatedCluster) -> DenseTimes:
    """Price the dense part on the GPU, or measure it here with one rank's share of the batch."""
    dense, dataset, measure = cluster.dense, cluster.dataset, cluster.measure
    tables, local_batch_size = cluster.task.tables, cluster.local_batch_size
    if cluster.gpu is not None:
        return dense.priced(cluster.gpu, dense.work(tables, local_batch_size))
    batches, data_ms = [dense.random_batch(local_batch_size)], 0.0
    if dataset is not None and (num_batches := dataset.num_batches("train")):
        batches, data_ms = read_batches(
            BatchStream(dataset, "train", world_size=cluster.task.topology.world_size),
            first_step=0,
            num_steps=num_batches,
            budget_s=measure.time_budget_s,
            num_kept=measure.num_batches,
        )
    return dense.measured(
        tables,
        batches,
        cluster.device,
        iterations=measure.iterations,
        time_budget_s=measure.time_budget_s,
        data_ms=data_ms,
    )
