"""Lines that meet the curves of exchanges at the even volumes of a task."""

import dataclasses

import numpy as np
import pytest

from dlrm_sharded.cost.communication import Hosts
from dlrm_sharded.cost.exchange_curves import EvenVolumes, ExchangeCurves
from dlrm_sharded.cost.workload import Floats
from dlrm_sharded.hardware.gpus.collectives import HostCollectives
from dlrm_sharded.hardware.gpus.gpu_specs import gpu_specs
from dlrm_sharded.plans.tables import Table
from tests.unit.made_up import task_of

CURVES = ExchangeCurves(HostCollectives(gpu_specs()["h100_sxm"]))
KINDS = ("fwd_comm", "bwd_comm", "input_dist")


def even(world_size: int, per_host: int, volume: float = 1e6) -> EvenVolumes:
    return EvenVolumes(world_size, per_host, volume=volume, id_volume=volume)


def all_to_all_ms(of: EvenVolumes, volumes: Floats, kind: str = "fwd_comm") -> Floats:
    hosts = Hosts(of.world_size, of.ranks_per_host)
    lines = CURVES.at(of)
    return lines.all_to_all_ms(kind, volumes[None], np.ones_like(volumes)[None], hosts)[0]


def reduce_ms(of: EvenVolumes, kind: str, volume: float, size: int) -> float:
    group = Hosts(of.world_size, of.ranks_per_host).group(size)
    times = CURVES.at(of).reduce_ms(kind, np.array([volume]), np.ones(1), group)
    return float(times[0])


@pytest.mark.parametrize("volume", [1.0, 1e4, 1e6, 1e8])
@pytest.mark.parametrize(("world_size", "per_host"), [(2, 2), (8, 8), (16, 8), (3, 1), (64, 8)])
def test_even_volumes_take_what_the_curve_says(
    world_size: int, per_host: int, volume: float
) -> None:
    of = even(world_size, per_host, volume)
    expected = CURVES.all_to_all_ms(volume, of)[0]
    for kind in KINDS:
        times = all_to_all_ms(of, np.full(world_size, volume), kind)
        np.testing.assert_allclose(times, expected, rtol=1e-9)
    for kind, collective in (("fwd_comm", "reduce_scatter"), ("bwd_comm", "all_gather")):
        found = reduce_ms(of, kind, volume, world_size)
        assert found >= CURVES.ring_ms(collective, volume, of) * (1 - 1e-9)
        # Large volumes cost a little more, where a line has parts of both kinds of links.
        if per_host in (1, world_size) or volume < 1e6:
            assert found == pytest.approx(CURVES.ring_ms(collective, volume, of))


@pytest.mark.parametrize(("world_size", "per_host"), [(8, 8), (16, 8), (4, 1)])
def test_no_weight_is_negative_and_slopes_follow_the_curve(world_size: int, per_host: int) -> None:
    for volume in 10.0 ** np.arange(10):
        of = even(world_size, per_host, float(volume))
        lines = CURVES.at(of)
        assert (lines.exchange >= 0).all()
        assert (lines.reduce >= 0).all()
        for factor in (0.75, 1.5):
            near = all_to_all_ms(of, np.full(world_size, volume * factor))[0]
            assert near == pytest.approx(CURVES.all_to_all_ms(volume * factor, of)[0], rel=0.25)


def test_all_wait_for_the_busiest_rank() -> None:
    of, volumes = even(8, 8, 4e6), np.full(8, 4e6)
    before = all_to_all_ms(of, volumes)
    volumes[3] *= 1.5
    assert (all_to_all_ms(of, volumes) > before).all()


def test_adapters_bound_exchanges_between_hosts() -> None:
    """47.5 of 50 GB/s; twice the bandwidth takes half the time, but for latencies."""
    of = even(16, 8, 1e7)
    ms, link = CURVES.all_to_all_ms(1e7, of)
    assert link == "inter"
    assert ms == pytest.approx(8 * 1e7 / 47.5e6, rel=0.03)
    stated = dataclasses.replace(of, inter_gb_per_s=100.0)
    assert CURVES.all_to_all_ms(1e7, stated)[0] == pytest.approx(ms / 2, rel=0.03)
    slow_links = dataclasses.replace(of, intra_gb_per_s=10.0)
    assert CURVES.all_to_all_ms(1e7, slow_links)[1] == "intra"


def test_groups_of_a_host_pay_nothing_between_hosts() -> None:
    of = even(16, 8, 1e6)
    alone = reduce_ms(even(8, 8, 1e6), "fwd_comm", 1e6, 8)
    assert reduce_ms(of, "fwd_comm", 1e6, 8) == pytest.approx(alone)
    assert reduce_ms(of, "fwd_comm", 1e6, 16) > alone


def test_one_rank_exchanges_nothing() -> None:
    lines = CURVES.at(even(1, 1))
    assert not lines.exchange.any()
    assert not lines.reduce.any()


def test_volumes_of_a_task() -> None:
    tables = (Table("a", 100, 16, 3.0), Table("b", 100, 48, 1.0))
    task = task_of(tables, 4, batch_size=800, local_world_size=2, inter_host_bytes_per_s=5e9)
    of = EvenVolumes.of_task(task)
    assert of.volume == pytest.approx(64 * 800 * 4 / 4 / 4)
    assert of.id_volume == pytest.approx(800 * (4 + 2) * 4 / 4 / 4)
    assert (of.intra_gb_per_s, of.inter_gb_per_s) == (None, 5.0)
