"""Builds the dataset of a config, for the run's batch size."""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig

from dlrm_sharded.commands.hydra_app import instantiate
from dlrm_sharded.datasets.base import Dataset
from dlrm_sharded.files.errors import ConfigError


def build_dataset(cfg: DictConfig) -> Dataset:
    """Build the dataset that `cfg.data` describes, with the global batch size of the run.

    Raises:
        ConfigError: the dataset has another batch size than the run, whose plan, predicted cost
            and throughput would then be those of other batches.
    """
    batch_size = cfg.batch_size
    stated = cfg.data.get("batch_size")
    if stated is not None:
        _check_equal("data.batch_size", stated, batch_size)
    dataset: Dataset = instantiate(cfg.data, batch_size=batch_size)
    _check_equal(
        f"the batch_size of {type(dataset).__name__}",
        getattr(dataset, "batch_size", "not there"),
        batch_size,
    )
    return dataset


def _check_equal(name: str, found: Any, batch_size: int) -> None:
    if found != batch_size:
        raise ConfigError(
            f"{name} is {found}, but batch_size is {batch_size:,}: batches, plan and throughput "
            "must be of one size; set batch_size alone, which the dataset is built with"
        )
