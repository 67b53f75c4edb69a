"""Finds what decides a step besides its plan, for `sharder.objective=step`.

A plan comes before anything is measured, so GPUs have the dense part of their data sheets. On a CPU
nothing runs beside anything, so its dense part changes no choice and is left out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from dlrm_sharded.commands.hydra_app import instantiate
from dlrm_sharded.cost.base import PricedTask
from dlrm_sharded.cost.cluster import Cluster
from dlrm_sharded.dense.gpu_prices import DENSE_ERROR
from dlrm_sharded.dense.model import DenseModel
from dlrm_sharded.files.errors import ConfigError
from dlrm_sharded.hardware.context import RunContext
from dlrm_sharded.hardware.gpus.gpu_specs import find_gpu_spec
from dlrm_sharded.model.optimizers import OptimizerConfig
from dlrm_sharded.step.parts import NO_DENSE
from dlrm_sharded.step.pipelines import PIPELINES
from dlrm_sharded.step.schedule import PIPELINED, SERIAL, Overlap

NUM_DENSE = 13
"""Dense features of a task without data: those of Criteo's data, and of all presets."""


def cluster_of(cfg: DictConfig, context: RunContext, priced: PricedTask) -> Cluster:
    """Return the cluster that a config plans for, by the prior of its dense part.

    Raises:
        ConfigError: the config does not say which GPU it is, or which model it trains.
    """
    task = priced.task
    of_cluster: Callable[..., Cluster] = Cluster.of_equal_ranks
    if task.topology.compute_device == "cpu":
        return of_cluster(task, NO_DENSE, priced=None, dense_error=0.0, overlap=SERIAL, seed=0)
    spec = None if context.hardware is None else find_gpu_spec(context.hardware.name)
    if spec is None:
        raise ConfigError(
            "sharder.objective is step, which needs the data sheet of the GPU; name one with "
            "hardware=, or leave sharder.objective out"
        )
    if cfg.get("model") is None:
        raise ConfigError(
            "sharder.objective is step, which needs the dense part of the model; name it with "
            "model=, one of conf/model"
        )
    num_dense = OmegaConf.select(cfg, "data.num_dense") or NUM_DENSE
    dense = build_dense(cfg, int(num_dense), instantiate(cfg.optimizer))
    with torch.random.fork_rng():  # the model draws its weights
        work = dense.work(task.tables, task.batch_size // task.topology.world_size)
    pipeline = OmegaConf.select(cfg, "trainer.pipeline") or "auto"
    return of_cluster(
        task,
        dense.priced(spec, work),
        priced=priced,
        dense_error=DENSE_ERROR,
        overlap=overlap_of(pipeline, "cuda"),
        seed=0,
    )


def build_dense(cfg: DictConfig, num_dense: int, optimizer: OptimizerConfig) -> DenseModel:
    """Build the dense part of the model and its training that a config describes."""
    return DenseModel(
        instantiate(cfg.model),
        num_dense,
        optimizer,
        bf16=bool(cfg.model.get("bf16", False)),
        seed=cfg.seed,
        compiled=cfg.model.get("compile_mode") is not None,
    )


def overlap_of(name: Any, compute_device: str) -> Overlap:
    """Return what runs beside what, by the name of a pipeline, auto, serial or pipelined.

    Raises:
        ConfigError: the name is another one.
    """
    usual = SERIAL if compute_device == "cpu" else PIPELINED
    known = {"auto": usual, "serial": SERIAL, "pipelined": PIPELINED} | {
        name: dataclasses.replace(
            usual, next_ids=pipeline.next_ids, next_lookup=pipeline.next_lookup
        )
        for name, pipeline in PIPELINES.items()
    }
    if name not in known:
        raise ConfigError(f"overlap is {name!r}; known: {', '.join(known)}")
    return known[name]
