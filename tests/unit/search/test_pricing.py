"""What replicas cost and save."""

import numpy as np
import pytest

from dlrm_sharded import Constraints
from dlrm_sharded.accesses.profiles import with_profiles
from dlrm_sharded.cost.exchange_prices import ExchangePrices
from dlrm_sharded.cost.shapes import Shapes
from dlrm_sharded.search.build_problem import build_problem, worth_replicating
from dlrm_sharded.search.pricing import Pricing
from dlrm_sharded.search.problem import LoadWeights
from dlrm_sharded.search.split_errors import SplitErrors
from tests.unit.search.made_up import model_of, roomy_task

TASK = with_profiles(roomy_task(np.random.default_rng(0), (1, 4), 12))


def test_the_first_replica_needs_a_lookup_and_an_all_reduce() -> None:
    priced = model_of("plain").price(TASK)
    prices = ExchangePrices.from_model(priced.communication, priced.hosts)
    pricing = Pricing(
        compute=priced.compute,
        prices=prices,
        weights=LoadWeights(0.0, prices),
        errors=SplitErrors.stated(0.0, Shapes.from_task(priced.task, priced.compute)),
        mean_read_mb=0.0,
    )
    launches = (net.next_launch_ms for net in (priced.compute.forward, priced.compute.backward))
    assert pricing.first_replica_ms == pytest.approx(prices.gradients.fixed_ms + sum(launches))


def test_a_replica_is_worth_it_that_saves_a_twentieth_of_its_work() -> None:
    """Where no search weighs replicas; here the first one costs less than they save together."""
    priced = model_of("overflowing").price(TASK)
    saved_ms, less_work_ms = (
        build_problem(
            priced, Constraints(), critical_path_share=0.0, split_error=error
        ).replica_gain_ms
        for error in (0.0, 1.0)
    )
    share = saved_ms / (saved_ms - less_work_ms)
    worth = {table.name for table, of in zip(TASK.tables, share, strict=True) if of > 0.05}
    assert worth_replicating(priced) == worth
    assert 0 < len(worth) < len(TASK.tables)
