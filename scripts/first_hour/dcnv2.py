"""MLPerf's DLRM-DCNv2 on one rank, built as a training run builds it."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from omegaconf import DictConfig
from torchrec.datasets.utils import Batch

from benchmarks.training import Training
from dlrm_sharded.commands.task import build_dataset
from dlrm_sharded.commands.yamls import CONF_DIR
from dlrm_sharded.datasets.base import BatchStream
from dlrm_sharded.datasets.synthetic import SyntheticDataset
from dlrm_sharded.model.dlrm import Dlrm
from dlrm_sharded.model.optimizers import OptimizerConfig
from dlrm_sharded.plans.task import GIB, ShardingTask
from dlrm_sharded.ranks.distributed import Rank
from dlrm_sharded.sharders.heuristics import GreedySharder

SMALL = (
    *("data.max_rows=1000", "model.cross_rank=16", "topology.memory_gib=0.5"),
    *("model.dense_layers=[32,128]", "model.over_layers=[32,1]"),
)
"""Overrides for a rehearsal on a CPU."""

NUM_BATCHES, SMALL_NUM_BATCHES = 16, 4
"""Batches of an epoch; all are kept in memory."""


@dataclass(frozen=True, slots=True)
class Dcnv2:
    """The model and what trains it.

    Args:
        model: the part of the sharded module that is the model.
        build_s: time of planning, allocating and initializing.
    """

    model: Dlrm
    training: Training
    table_gib: float
    build_s: float


def dcnv2_dataset(batch_size: int, *overrides: str, small: bool) -> SyntheticDataset:
    """Return MLPerf's data, whose training batches are generated when the first one is used."""
    config = _config(small, f"batch_size={batch_size}", "data.num_val_batches=1", *overrides)
    dataset = build_dataset(config)
    assert isinstance(dataset, SyntheticDataset)
    return dataset


def build(dataset: SyntheticDataset, device: torch.device, *overrides: str, small: bool) -> Dcnv2:
    """Build the model for the tables of a dataset; all lie on this rank, whole."""
    started = time.perf_counter()
    config = _config(small, f"batch_size={dataset.batch_size}", *overrides)
    optimizer_config: OptimizerConfig = instantiate(config.optimizer)
    topology = dataclasses.replace(
        instantiate(config.topology),
        bytes_per_element=optimizer_config.bytes_per_element,
        optimizer_bytes_per_row=optimizer_config.bytes_per_row,
    )
    task = ShardingTask(dataset.tables, topology, dataset.batch_size)
    torch.manual_seed(0)
    model: Dlrm = instantiate(config.model)(task.tables, dataset.num_dense, device=device)
    optimizer_config.fuse_into(model)
    plan = GreedySharder("size_lookup").shard(task)
    training = Training.under(plan, model, task, Rank(0, 1, 0, 1, device), optimizer_config)
    if device.type == "cuda":
        torch.cuda.synchronize()
    return Dcnv2(
        model,
        training,
        table_gib=round(task.table_bytes / GIB, 2),
        build_s=round(time.perf_counter() - started, 1),
    )


def endless(batches: Iterable[Batch]) -> Iterator[Batch]:
    while True:
        yield from batches


def train_batches(dataset: SyntheticDataset) -> BatchStream:
    return BatchStream(dataset, "train", rank=0, world_size=1, shuffle_seed=0)


def _config(small: bool, *overrides: str) -> DictConfig:
    num_batches = SMALL_NUM_BATCHES if small else NUM_BATCHES
    # all tables on one H200 need a larger share of its memory than other trainings
    sizes = SMALL if small else ("topology.memory_fraction=0.8",)
    experiment = (
        *("experiment=mlperf_dcnv2", f"data.num_train_batches={num_batches}"),
        "model.compile_mode=null",  # cases that are compiled say so
    )
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF_DIR)):
        return compose("train", [*experiment, *sizes, *overrides])
