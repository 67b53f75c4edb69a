"""Access profiles for tables whose accesses were not measured: those with the expected cost.

The skew of such a table's accesses is not known, so its cost is an expectation over `SKEWS`. The
search needs one profile for each table, so the table gets the profile that has this cost.

Letters: T tables, P skews.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from dlrm_sharded.accesses.profiles import SKEWS, histograms_by_skew
from dlrm_sharded.cost.compute import ComputeModel
from dlrm_sharded.cost.workload import Floats, workload_of_tables
from dlrm_sharded.plans.task import ShardingTask

NUM_BISECTIONS = 12
"""Steps of the bisection between the least and the most skewed profile."""


def with_expected_profiles(task: ShardingTask, compute: ComputeModel) -> ShardingTask:
    """Return the task with a reuse histogram for every table that has none.

    With it, the whole table, alone on a rank, costs the expectation over `SKEWS`.
    """
    unknown = [table for table in task.tables if table.reuse_histogram is None]
    if not unknown:
        return task
    by_skew = np.array(  # [P, T, 17], from uniform accesses to the most skewed
        [histograms_by_skew(t.num_embeddings, task.batch_size * t.pooling_factor) for t in unknown]
    ).swapaxes(0, 1)
    whole = workload_of_tables(unknown, task.batch_size)

    def cost_ms(histograms: Floats) -> Floats:
        workload = dataclasses.replace(whole, reuse_histogram=histograms)
        return compute.stand_alone_ms(compute.vectors(workload))

    expected_ms = np.array(list(SKEWS.values())) @ np.array([cost_ms(h) for h in by_skew])
    # More skewed accesses are cheaper, because they read fewer distinct rows.
    low, high = np.zeros(len(unknown)), np.full(len(unknown), len(SKEWS) - 1.0)
    for _ in range(NUM_BISECTIONS):
        middle = (low + high) / 2
        is_above = cost_ms(_between(by_skew, middle)) > expected_ms
        low, high = np.where(is_above, middle, low), np.where(is_above, high, middle)
    histograms = map(tuple, _between(by_skew, high).tolist())
    return task.with_values(
        reuse_histogram=dict(zip((t.name for t in unknown), histograms, strict=True))
    )


def _between(by_skew: Floats, place: Floats) -> Floats:
    """Return [T, 17], histograms interpolated at places [T] between the skews [P, T, 17]."""
    below = np.minimum(place.astype(np.int64), len(by_skew) - 2)
    share = (place - below)[:, None]
    table = np.arange(len(place))
    return (1 - share) * by_skew[below, table] + share * by_skew[below + 1, table]
