"""What replicas cost that is no part of any one of them."""

import numpy as np
import pytest

from dlrm_sharded.cost.exchange_prices import ExchangePrices
from dlrm_sharded.search.pricing import Pricing
from dlrm_sharded.search.problem import LoadWeights
from tests.unit.search.made_up import model_of, roomy_task


def test_the_first_replica_needs_a_lookup_and_an_all_reduce() -> None:
    priced = model_of("plain").price(roomy_task(np.random.default_rng(0), (1, 4), 3))
    prices = ExchangePrices.from_model(priced.communication, priced.hosts)
    pricing = Pricing(
        compute=priced.compute,
        prices=prices,
        weights=LoadWeights(0.0, prices),
        split_error=0.0,
        mean_read_mb=0.0,
    )
    launches = (net.next_launch_ms for net in (priced.compute.forward, priced.compute.backward))
    assert pricing.first_replica_ms == pytest.approx(prices.gradients.fixed_ms + sum(launches))
