"""Access profiles of tables that were not measured: expectations of Zipf distributions."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable

from dlrm_sharded.accesses.zipf import Zipf, cached_zipf
from dlrm_sharded.plans.tables import Table
from dlrm_sharded.plans.task import ShardingTask

ASSUMED_EXPONENT = 0.9
"""Zipf exponent that fits Meta's dlrm_datasets best; it is assumed for tables without a profile
where no costs are known, see `cost.expected_profiles`."""

SKEWS = {0.0: 0.1, 0.4: 0.2, 0.8: 0.4, 1.2: 0.3}
"""Zipf exponents that tables without a profile may have, ascending, and their weights.

Of the accesses to Meta's dlrm_datasets, nonnegative least squares over the shares of their reuse
bins gives 4 in 5 an exponent of 0.9 and the others one of 0.3. HugeCTR and NVIDIA's models state
1.05 to 1.1.
"""


def with_profiles(task: ShardingTask) -> ShardingTask:
    """Return the task with the histogram of `ASSUMED_EXPONENT` for every table that has none."""
    unknown = [table for table in task.tables if table.reuse_histogram is None]
    assumed = with_expected_profile(unknown, batch_size=task.batch_size, exponent=ASSUMED_EXPONENT)
    return task.with_values(reuse_histogram={t.name: t.reuse_histogram for t in assumed})


def with_expected_profile(
    tables: Iterable[Table], *, batch_size: int, exponent: float
) -> tuple[Table, ...]:
    """Return the tables with the expected reuse histogram of a Zipf-distributed global batch."""
    return tuple(
        dataclasses.replace(
            table,
            reuse_histogram=_expected_reuse_histogram(
                table.num_embeddings, exponent, batch_size * table.pooling_factor
            ),
        )
        for table in tables
    )


@functools.lru_cache(maxsize=65_536)
def _expected_reuse_histogram(num_ids: int, exponent: float, num_draws: float) -> tuple[float, ...]:
    return cached_zipf(num_ids, exponent).expected_reuse_histogram(num_draws)


@functools.lru_cache(maxsize=65_536)
def histograms_by_skew(num_ids: int, num_draws: float) -> tuple[tuple[float, ...], ...]:
    """Return the expected reuse histogram for each of `SKEWS`, from few ranges, to be fast."""
    return tuple(
        Zipf(num_ids, exponent, num_exact=16, ranges_per_octave=6).expected_reuse_histogram(
            num_draws
        )
        for exponent in SKEWS
    )
