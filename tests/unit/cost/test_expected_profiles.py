"""Profiles that were not measured: of tables without one, and of the samples of one rank."""

import dataclasses

import numpy as np
import pytest

from dlrm_sharded import RunContext, Table, learned_cost_model
from dlrm_sharded.accesses.profiles import SKEWS, with_expected_profile
from dlrm_sharded.cost.compute import ComputeModel
from dlrm_sharded.cost.expected_profiles import with_expected_profiles
from dlrm_sharded.cost.local_profiles import local_histograms
from dlrm_sharded.cost.workload import workload_of_plan
from dlrm_sharded.plans.tables import NUM_REUSE_BINS
from tests.unit.synthetic import USED_ONCE, in_turns, tables_of, task_of

COMPUTE = learned_cost_model(RunContext(device="cpu")).compute
SHAPES = [(100, 4, 0.5), (40_000, 16, 30.0), (3_000_000, 64, 8.0), (40_000_000, 128, 1.0)]
UNKNOWN = tables_of(*SHAPES)
KNOWN = Table("known", 1000, 16, 2.0, USED_ONCE)
TASK = task_of((KNOWN, *UNKNOWN), 1, 2**40, 8192)


def whole_ms(tables: tuple[Table, ...], compute: ComputeModel) -> np.ndarray:
    task = dataclasses.replace(TASK, tables=tables)
    plan = in_turns(task)
    return compute.stand_alone_ms(compute.vectors(workload_of_plan(plan, task)))


def test_a_table_costs_the_mean_over_the_skews() -> None:
    by_skew = [
        whole_ms(with_expected_profile(UNKNOWN, batch_size=8192, exponent=exponent), COMPUTE)
        for exponent in SKEWS
    ]

    known, *assumed = with_expected_profiles(TASK, COMPUTE).tables

    assert known == KNOWN
    expected = np.array(list(SKEWS.values())) @ np.array(by_skew)
    assert whole_ms(tuple(assumed), COMPUTE) == pytest.approx(expected, rel=5e-3)
    for table in assumed:
        assert sum(table.reuse_histogram) == pytest.approx(1.0)


ENDS = 2 ** np.arange(NUM_REUSE_BINS - 1)


def histogram(uses: np.ndarray) -> np.ndarray:
    """Return the reuse histogram [17] of ids with so many uses; those of 0 do not count."""
    uses = uses[uses > 0]
    counts = np.bincount(np.searchsorted(ENDS, uses), minlength=NUM_REUSE_BINS)
    return counts / counts.sum()


@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_against_ids_dealt_out(world_size: int) -> None:
    rng = np.random.default_rng(0)
    # The middles of the bins, as use counts within one are not known.
    uses = rng.choice(
        [1, 2, 3, 6, 12, 96, 768], size=200_000, p=[0.4, 0.2, 0.1, 0.1, 0.1, 0.05, 0.05]
    )
    dealt = rng.binomial(uses, 1.0 / world_size)

    (local,) = local_histograms(histogram(uses)[None], world_size)

    assert local == pytest.approx(histogram(dealt), abs=0.01)
