"""Builds what the config of a simulation describes: the task, the device and the dense part."""

from __future__ import annotations

import dataclasses
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from torchrec.datasets.utils import Batch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_sharded.calibration.measure import MeasureConfig
from dlrm_sharded.commands.hydra_app import instantiate
from dlrm_sharded.commands.task_file import task_of_file
from dlrm_sharded.commands.task_from_data import check_hosts, task_and_data
from dlrm_sharded.datasets.base import BatchStream, Dataset
from dlrm_sharded.datasets.read_batches import read_batches
from dlrm_sharded.dense.gpu_prices import gpu_dense_times
from dlrm_sharded.dense.times import measure_dense
from dlrm_sharded.dense.trace import trace_dense
from dlrm_sharded.dense.work_trace import trace_dense_work
from dlrm_sharded.files.errors import ConfigError, check_count, check_number
from dlrm_sharded.files.json_files import folder_to_write
from dlrm_sharded.files.provenance import fbgemm_version, versions
from dlrm_sharded.hardware.context import RunContext
from dlrm_sharded.hardware.detect import local_hardware
from dlrm_sharded.hardware.gpus.gpu_specs import GpuSpec, named_gpu_spec
from dlrm_sharded.hardware.hardware import Hardware
from dlrm_sharded.model.dlrm import Dlrm
from dlrm_sharded.model.optimizers import DENSE_STATE_TENSORS, OptimizerConfig
from dlrm_sharded.plans.task import GIB, ShardingTask, Topology
from dlrm_sharded.ranks.devices import device_type
from dlrm_sharded.ranks.process import threads_of_a_rank
from dlrm_sharded.step.core_sharing import CoreSharing
from dlrm_sharded.step.parts import DenseTimes
from dlrm_sharded.step.schedule import PIPELINED, SERIAL, Overlap
from dlrm_sharded.training.memory import Workload

log = logging.getLogger(__name__)

HERE = "here"
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
    optimizer: OptimizerConfig
    measure: MeasureConfig
    overlap: Overlap
    table_limit_bytes: int
    num_neighbors: int = 0
    sharing: CoreSharing | None = None
    notes: tuple[str, ...] = ()

    @property
    def local_batch_size(self) -> int:
        return self.task.batch_size // self.task.topology.world_size

    @property
    def num_dense(self) -> int:
        return NUM_DENSE if self.dataset is None else self.dataset.num_dense


def build_cluster(cfg: DictConfig) -> SimulatedCluster:
    """Build what a config describes.

    Raises:
        ConfigError: a value cannot be used.
        DataError: the data cannot be read.
    """
    if (cfg.task is None) == (cfg.get("data") is None):
        raise ConfigError(
            "name either task=task.json or data=, one of conf/data, and not both, to simulate"
        )
    gpu = None if cfg.hardware == HERE else named_gpu_spec(cfg.hardware, key="hardware")
    at_hand = "cpu" if gpu else device_type()
    compute_device = "cuda" if gpu else at_hand
    notes: list[str] = []
    dataset: Dataset | None = None
    if cfg.task is not None:
        task, optimizer = _read_task(cfg, compute_device, gpu, notes)
    else:
        task, dataset = _task_of_data(cfg, compute_device, gpu, notes)
        optimizer = instantiate(cfg.optimizer)
    if gpu is not None:
        gpu.check_memory(max(task.topology.rank_memory_bytes) / GIB)
    if gpu is None and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(threads_of_a_rank(task.topology.ranks_per_host))
    device = torch.device(at_hand)
    hardware = Hardware(gpu.device_name) if gpu else local_hardware(device)
    return SimulatedCluster(
        task=task,
        dataset=dataset,
        context=RunContext(
            compute_device,
            hardware,
            optimizer.embedding,
            task.topology.ranks_per_host,
            None if gpu else fbgemm_version(versions()),
        ),
        gpu=gpu,
        device=device,
        optimizer=optimizer,
        measure=instantiate(cfg.measure),
        overlap=_overlap(cfg.overlap, compute_device),
        table_limit_bytes=_table_limit(cfg.table_gib, device),
        num_neighbors=_num_neighbors(
            cfg.neighbors, task.topology, at_hand if gpu is None else None
        ),
        sharing=_core_sharing(cfg.host_cores, task.topology, compute_device),
        notes=tuple(notes),
    )


def _read_task(
    cfg: DictConfig, compute_device: str, gpu: GpuSpec | None, notes: list[str]
) -> tuple[ShardingTask, OptimizerConfig]:
    """Return the task of a file, for the device that the simulation is on, and the optimizer."""
    of_file = task_of_file(cfg)
    path, task, optimizer = cfg.task, of_file.task, instantiate(of_file.optimizer)
    if of_file.note is not None:
        notes.append(of_file.note)
    optimizer.check_device(torch.device(compute_device))
    topology = task.topology
    if task.batch_size % topology.world_size:
        raise ConfigError(
            f"batch_size in {path} is {task.batch_size:,}; it is global and must be a multiple of "
            f"the {topology.world_size} ranks (topology.world_size)"
        )
    if topology.compute_device == compute_device:
        return task, optimizer
    if gpu is not None:
        raise ConfigError(
            f"hardware is {gpu.key!r}, a GPU, and the task is for CPUs; set hardware to here, or "
            "topology.compute_device to cuda in task.json"
        )
    notes.append(
        f"the task is for ranks on {topology.compute_device}; the device at hand is a "
        f"{compute_device}, so the ranks of the simulation compute on that"
    )
    topology = dataclasses.replace(topology, compute_device=compute_device)
    return dataclasses.replace(task, topology=topology), optimizer


def _task_of_data(
    cfg: DictConfig, compute_device: str, gpu: GpuSpec | None, notes: list[str]
) -> tuple[ShardingTask, Dataset]:
    """Return the task of the config's data, and the data."""
    cfg = cfg.copy()
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
    return task_and_data(cfg)


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


def build_model(cfg: DictConfig, cluster: SimulatedCluster, device: torch.device) -> Dlrm:
    """Build the model on a device; its tables have no memory."""
    torch.manual_seed(cfg.seed)
    model: Dlrm = instantiate(cfg.model)(cluster.task.tables, cluster.num_dense, device=device)
    return model


def memory_workload(cfg: DictConfig, cluster: SimulatedCluster) -> Workload:
    """Return what a run needs memory for, besides its tables; batches are not kept."""
    dense = trace_dense(
        lambda device: build_model(cfg, cluster, device),
        cluster.task.tables,
        num_dense=cluster.num_dense,
        local_batch_size=cluster.local_batch_size,
    )
    return Workload(
        dense=dense,
        dense_state_bytes=DENSE_STATE_TENSORS[cluster.optimizer.dense] * dense.parameter_bytes,
        num_dense=cluster.num_dense,
        num_measured_batches=0,
        num_eval_samples=0,
    )


def priced_dense(cfg: DictConfig, cluster: SimulatedCluster) -> DenseTimes:
    """Return the times of the dense part on the GPU whose prior prices the simulation."""
    assert cluster.gpu is not None
    work = trace_dense_work(
        lambda device: build_model(cfg, cluster, device),
        cluster.task.tables,
        num_dense=cluster.num_dense,
        local_batch_size=cluster.local_batch_size,
        state_tensors=DENSE_STATE_TENSORS[cluster.optimizer.dense],
    )
    return gpu_dense_times(work, cluster.gpu, bf16=bool(cfg.model.get("bf16", False)))


def measured_dense(cfg: DictConfig, cluster: SimulatedCluster) -> DenseTimes:
    """Measure the dense part with one rank's share of the batch on the device at hand."""
    batches, data_ms = _batches(cluster)
    return measure_dense(
        build_model(cfg, cluster, cluster.device),
        cluster.task.tables,
        [batch.to(cluster.device) for batch in batches],
        cluster.optimizer,
        iterations=cluster.measure.iterations,
        time_budget_s=cluster.measure.time_budget_s,
        data_ms=data_ms,
    )


def _batches(cluster: SimulatedCluster) -> tuple[list[Batch], float]:
    """Return batches of rank 0, and the mean time to read one in ms; 0 without a dataset."""
    dataset, world_size = cluster.dataset, cluster.task.topology.world_size
    num_batches = 0 if dataset is None else dataset.num_batches("train")
    if dataset is None or num_batches == 0:
        generator = torch.Generator().manual_seed(0)
        samples = cluster.local_batch_size
        batch = Batch(
            dense_features=torch.rand(samples, cluster.num_dense, generator=generator),
            sparse_features=KeyedJaggedTensor(
                keys=[], values=torch.empty(0), lengths=torch.empty(0, dtype=torch.int32)
            ),
            labels=torch.randint(2, (samples,), generator=generator).float(),
        )
        return [batch], 0.0
    return read_batches(
        BatchStream(dataset, "train", world_size=world_size),
        first_step=0,
        num_steps=num_batches,
        budget_s=cluster.measure.time_budget_s,
        num_kept=cluster.measure.num_batches,
    )


def checked_out(out: Any) -> Path:
    """Return the folder of the results; ConfigError if none is named, or none can be."""
    if not out:
        raise ConfigError("out is not set; name the folder of the results")
    return folder_to_write("out", str(out))
