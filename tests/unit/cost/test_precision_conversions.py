"""Costs of exchanges in other precisions: fewer bytes, and the time to convert them."""

import dataclasses

import numpy as np
import pytest

from dlrm_sharded import Shard, ShardingPlan, ShardingTask, Table
from dlrm_sharded.accesses.profiles import with_profiles
from dlrm_sharded.cost.communication import EXCHANGES, CommunicationModel
from dlrm_sharded.cost.exchange_costs import ExchangeCosts, LeastExchangeCosts
from dlrm_sharded.cost.exchange_terms import EXCHANGE_TERMS, REDUCE_TERMS, Hosts
from dlrm_sharded.cost.learned import LearnedCostModel
from dlrm_sharded.cost.precision_conversions import ConversionTimes, gpu_conversions
from dlrm_sharded.cost.workload import Exchange, Floats, Reduce
from dlrm_sharded.plans.plan import with_precisions
from dlrm_sharded.plans.precision import ExchangePrecision
from tests.unit.synthetic import task_of

FP16, INT8 = ExchangePrecision("fp16", "fp16"), ExchangePrecision("int8", "int8")
FP16_FORWARD = ExchangePrecision("fp16", "fp32")
TABLES = (Table("a", 4000, 64, 8.0), Table("b", 900, 128, 2.0), Table("c", 9, 32, 1.0))
PLAN = ShardingPlan(2, (Shard.whole(TABLES[0], 0), *(Shard.whole(t, 1) for t in TABLES[1:])))


def of_bytes(*, exchange: str = "max_busier_intra", reduce: str = "intra") -> CommunicationModel:
    """1 ms for a MB and 0.1 ms for each exchange."""
    weights = np.zeros((len(EXCHANGES), len(EXCHANGE_TERMS)))
    weights[:, EXCHANGE_TERMS.index(exchange)] = 1.0
    weights[:, EXCHANGE_TERMS.index("one")] = 0.1
    reduces = np.zeros((len(EXCHANGES), len(REDUCE_TERMS)))
    reduces[:, REDUCE_TERMS.index(reduce)] = 1.0
    reduces[:, REDUCE_TERMS.index("one")] = 0.1
    return CommunicationModel(weights, reduces)


HOSTS = Hosts(2, 2)
VOLUME = np.array([3e6, 1e6])
COLUMNS = Exchange(VOLUME, np.ones(2), ())
ROWS = Exchange(np.zeros(2), np.zeros(2), (Reduce(2, np.full(2, 2e6), np.ones(2), np.ones(2)),))
CONVERSIONS = {
    "fp16": ConversionTimes(0.01, 0.02, 0.04, 0.08, 0.16),
    "int8": ConversionTimes(0.1, 0.2, 0.4, 0.8),
}


def times(precision: ExchangePrecision, kind: str, exchange: Exchange) -> Floats:
    return of_bytes().with_precision(precision, CONVERSIONS).exchange_ms(kind, exchange, HOSTS)


def test_halves_bytes_and_counts_conversions() -> None:
    """Rank 0 has 6 MB of its own columns and gets 4 MB of its samples, rank 1 has 2 MB."""
    own_mb, of_samples_mb = np.array([6.0, 2.0]), 4.0
    forward = 0.1 + 3.0 / 2 + 0.01 * own_mb + 0.02 * of_samples_mb
    np.testing.assert_allclose(times(FP16, "fwd_comm", COLUMNS), forward)
    backward = 0.1 + 3.0 / 2 + 0.04 * of_samples_mb + 0.08 * own_mb
    np.testing.assert_allclose(times(FP16, "bwd_comm", COLUMNS), backward)
    in_int8 = 0.1 + 3.0 * 10 / 32 + 0.1 * own_mb + 0.2 * of_samples_mb
    np.testing.assert_allclose(times(INT8, "fwd_comm", COLUMNS), in_int8)


def test_directions_are_apart_and_ids_are_exact() -> None:
    for kind, precision in (("bwd_comm", FP16_FORWARD), ("input_dist", FP16)):
        for exchange in (COLUMNS, ROWS):
            exact = of_bytes().exchange_ms(kind, exchange, HOSTS)
            np.testing.assert_array_equal(times(precision, kind, exchange), exact)
    assert (times(FP16_FORWARD, "fwd_comm", COLUMNS) == times(FP16, "fwd_comm", COLUMNS)).all()


@pytest.mark.parametrize("hosts", [Hosts(4, 4), Hosts(4, 2)], ids=["1x4", "2x2"])
def test_search_and_bound_see_the_same_costs(hosts: Hosts) -> None:
    """Costs of bytes follow from the model, and no least cost exceeds one at even volumes."""
    model = of_bytes().with_precision(FP16, CONVERSIONS)
    costs = ExchangeCosts.from_model(model, hosts)
    volume, shards = np.full((1, 4), 1e6), np.ones((1, 4))
    both = [model.all_to_all_ms(kind, volume, shards, hosts) for kind in ("fwd_comm", "bwd_comm")]
    even_ms = float(sum(both)[0, 0])
    assert costs.fixed_ms + 1e6 * costs.even_byte_ms == pytest.approx(even_ms)
    assert costs.own_byte_ms >= 4 * (0.01 + 0.08) / 1e6 * (1 - 1e-6)
    least = LeastExchangeCosts.from_model(model, hosts)
    assert least.own_byte_ms + 4 * least.any_byte_ms <= costs.even_byte_ms * (1 + 1e-9)


def task(device: str, batch_size: int = 4096) -> ShardingTask:
    return with_profiles(task_of(TABLES, batch_size=batch_size, device=device))


def test_a_model_predicts_the_precision_of_a_plan(of_device: LearnedCostModel) -> None:
    rounded = dataclasses.replace(PLAN, exchange_precision=FP16_FORWARD)
    of_task = task(of_device.device)
    exact, found = (of_device.predict(plan, of_task) for plan in (PLAN, rounded))
    for ours, theirs in zip(found.per_rank, exact.per_rank, strict=True):
        assert ours.fwd_comm_ms != theirs.fwd_comm_ms
        assert dataclasses.replace(ours, fwd_comm_ms=theirs.fwd_comm_ms) == theirs
    assert of_device.cost_task(with_precisions(of_task, rounded)).predict(PLAN) == found


def test_conversions_on_gpus_move_bytes() -> None:
    """fp16: read 4 and write 4 to clamp, then read 4 and write 2; 1 MB is 250,000 numbers."""
    assert gpu_conversions(1000)["fp16"].forward_encode == pytest.approx(250_000 * 14 / 1e12 * 1e3)
