"""Builds what the config of a simulation describes: the task, the device and the dense part."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from typing import Any

import torch
from omegaconf import DictConfig
from torchrec.datasets.utils import Batch

from dlrm_sharded.calibration.measure import MeasureConfig
from dlrm_sharded.commands.hydra_app import instantiate
from dlrm_sharded.commands.sharders import run_context
from dlrm_sharded.commands.task import HERE, asked_task, check_hosts, check_question
from dlrm_sharded.datasets.base import BatchStream, Dataset
from dlrm_sharded.datasets.read_batches import read_batches
from dlrm_sharded.dense.model import DenseModel
from dlrm_sharded.files.errors import ConfigError, check_count, check_number
from dlrm_sharded.hardware.context import RunContext
from dlrm_sharded.hardware.gpus.gpu_specs import GpuSpec, named_gpu_spec
from dlrm_sharded.model.optimizers import OptimizerConfig
from dlrm_sharded.plans.task import GIB, ShardingTask, Topology
from dlrm_sharded.ranks.devices import device_type
from dlrm_sharded.step.core_sharing import CoreSharing
from dlrm_sharded.step.parts import DenseTimes
from dlrm_sharded.step.schedule import PIPELINED, SERIAL, Overlap
from dlrm_sharded.training.memory import Workload

LOCAL_BATCH_SIZE = 512
"""Samples of a rank if no batch size is stated."""

NUM_DENSE = 13
"""Dense features of a task without data: those of Criteo's data, and of all presets."""

TABLE_SHARE = 0.5
"""Share of this machine's memory for one rank's tables."""

MAX_NEIGHBORS = 256

OVERLAPS = {"serial": SERIAL, "pipelined": PIPELINED}


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
    task = asked.task if gpu else _on_device(asked.task, compute_device, notes)
    device = torch.device(at_hand)
    context = run_context(cfg.hardware, task, optimizer.embedding)
    return SimulatedCluster(
        task=task,
        dataset=asked.dataset,
        context=context,
        gpu=gpu,
        device=device,
        dense=DenseModel(
            instantiate(cfg.model),
            NUM_DENSE if asked.dataset is None else asked.dataset.num_dense,
            optimizer,
            bf16=bool(cfg.model.get("bf16", False)),
            seed=cfg.seed,
        ),
        optimizer=asked.optimizer,
        measure=instantiate(cfg.measure),
        overlap=_overlap(cfg.overlap, compute_device),
        table_limit_bytes=_table_limit(cfg.table_gib, device),
        num_neighbors=_num_neighbors(
            cfg.neighbors, task.topology, at_hand if gpu is None else None
        ),
        sharing=_core_sharing(cfg.host_cores, task.topology, compute_device),
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
        ranks_per_host = topology.ranks_per_host or topology.world_size
        topology.memory_gib = _memory_share_gib(topology.memory_fraction, ranks_per_host)
        notes.append(
            f"topology.memory_gib is not set: every rank has {topology.memory_gib:g} GiB for "
            "tables, as on hosts like this machine"
        )
    if cfg.batch_size is None:
        cfg.batch_size = LOCAL_BATCH_SIZE * topology.world_size
    return cfg, notes


def _memory_share_gib(fraction: float, ranks_per_host: int) -> float:
    """Return the memory of one rank for tables on hosts like this one, in GiB."""
    check_number("topology.memory_fraction", fraction, most=1.0, above=True)
    if device_type() == "cuda":
        total = torch.cuda.get_device_properties(0).total_memory
        return round(fraction * total / GIB, 2)
    return max(0.01, round(fraction * _total_host_bytes() / max(1, ranks_per_host) / GIB, 2))


def _total_host_bytes() -> int:
    """Return the memory of this machine; unlike the free memory, it is always the same."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _table_limit(table_gib: Any, device: torch.device) -> int:
    if table_gib is not None:
        check_number("table_gib", table_gib, above=True, most=2**20)
        return int(table_gib * GIB)
    if device.type == "cuda":
        return int(TABLE_SHARE * torch.cuda.get_device_properties(device).total_memory)
    return int(TABLE_SHARE * _total_host_bytes())


def _num_neighbors(value: Any, topology: Topology, measured_on: str | None) -> int:
    """Return the number of processes that compute beside a measurement, if there is one."""
    if value != "auto":
        check_count("neighbors (a number, or auto)", value, least=0, most=MAX_NEIGHBORS)
        return int(value)
    if measured_on != "cpu":
        return 0
    ranks_at_once = len(os.sched_getaffinity(0)) // torch.get_num_threads()
    return max(0, min(topology.ranks_per_host, ranks_at_once) - 1)


def _core_sharing(host_cores: Any, topology: Topology, compute_device: str) -> CoreSharing | None:
    """Return how ranks share the cores of their host; None if the host has enough of them."""
    if host_cores is None:
        return None
    check_count("host_cores", host_cores, least=1)
    if compute_device != "cpu":
        raise ConfigError("host_cores is set, and the ranks compute on GPUs; leave it out")
    ranks_at_once = host_cores / torch.get_num_threads()
    if ranks_at_once >= topology.ranks_per_host:
        return None
    return CoreSharing(topology.ranks_per_host, ranks_at_once)


def _overlap(name: Any, compute_device: str) -> Overlap:
    if name == "auto":
        return SERIAL if compute_device == "cpu" else PIPELINED
    if name not in OVERLAPS:
        raise ConfigError(f"overlap is {name!r}; known: auto, {', '.join(OVERLAPS)}")
    return OVERLAPS[name]


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
    tables = cluster.task.tables
    if cluster.gpu is not None:
        work = cluster.dense.work(tables, cluster.local_batch_size)
        return cluster.dense.priced(cluster.gpu, work)
    batches, data_ms = _batches(cluster)
    return cluster.dense.measured(
        tables,
        batches,
        cluster.device,
        iterations=cluster.measure.iterations,
        time_budget_s=cluster.measure.time_budget_s,
        data_ms=data_ms,
    )


def _batches(cluster: SimulatedCluster) -> tuple[list[Batch], float]:
    """Return batches of rank 0, and the mean time to read one in ms; 0 without a dataset."""
    dataset, world_size = cluster.dataset, cluster.task.topology.world_size
    num_batches = 0 if dataset is None else dataset.num_batches("train")
    if dataset is None or num_batches == 0:
        return [cluster.dense.random_batch(cluster.local_batch_size)], 0.0
    return read_batches(
        BatchStream(dataset, "train", world_size=world_size),
        first_step=0,
        num_steps=num_batches,
        budget_s=cluster.measure.time_budget_s,
        num_kept=cluster.measure.num_batches,
    )
