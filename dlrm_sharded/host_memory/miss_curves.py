"""Measures miss-ratio curves of tables on the training batches of a dataset."""

from __future__ import annotations

import logging
import time

from dlrm_sharded.datasets.base import Dataset
from dlrm_sharded.files.errors import check_count
from dlrm_sharded.host_memory.miss_ratio import expected_curve, measured_curve
from dlrm_sharded.host_memory.stack_distances import AccessRecorder
from dlrm_sharded.plans.task import ShardingTask

AUTO = "auto"
AUTO_BATCHES = 32
"""Batches that are measured where the tables exceed the memory of GPUs; half of them warm up."""

MAX_ACCESSES = 2_000_000
"""Accesses to a table that are followed. Of a table with more, a sample of the rows is followed;
docs/reference/cached_tables.md has the error of that."""

MIN_SHARE = 1e-3
"""Tables with less than this share of the memory of all tables are not worth caching."""

log = logging.getLogger(__name__)


def num_curve_batches(configured: object, task: ShardingTask) -> int:
    """Return the number of batches to measure, which is 0 if the tables fit the ranks.

    Raises:
        ConfigError: the configured value is neither a number nor auto.
    """
    if configured != AUTO:
        check_count("curve_batches", configured, least=0)
        assert isinstance(configured, int)
        return configured
    is_too_large = task.table_bytes > sum(task.topology.rank_memory_bytes)
    return AUTO_BATCHES if is_too_large and task.topology.compute_device == "cuda" else 0


def with_measured_curves(task: ShardingTask, dataset: Dataset, num_batches: int) -> ShardingTask:
    """Return the task with the curves of its large tables, measured on the first batches.

    Batches are read in the order of the data; a shuffled epoch repeats rows as often.
    """
    num_batches = min(num_batches, dataset.num_batches("train"))
    if num_batches < 2:
        return task
    started = time.perf_counter()
    least = MIN_SHARE * task.table_bytes
    large = [t for t in task.tables if task.topology.table_bytes(t) >= least]
    recorders: dict[str, AccessRecorder] = {}
    rates = []
    for index in range(num_batches):
        sparse = dataset.batch("train", index, rank=0, world_size=1).sparse_features
        for table in large:
            ids = sparse[table.name].values().numpy()
            if index == 0:
                rates.append(min(1.0, MAX_ACCESSES / max(1, num_batches * len(ids))))
                recorders[table.name] = AccessRecorder(rates[-1])
            recorders[table.name].add(ids)
    curves = {
        table.name: measured_curve(
            recorders[table.name].measure(), table.num_embeddings
        ).with_tail_of(expected_curve(table, task.batch_size))
        for table in large
    }
    log.info(
        "measured the miss-ratio curves of %d tables on %d batches in %.1f s, on %.2g to %.2g of "
        "their rows",
        len(large),
        num_batches,
        time.perf_counter() - started,
        min(rates),
        max(rates),
    )
    points = {name: curve.points for name, curve in curves.items()}
    return task.with_values(miss_ratio_curve=points)
