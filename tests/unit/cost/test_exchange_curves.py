"""Lines that meet the curves of exchanges at the even volumes of a task."""

import numpy as np
import pytest

from dlrm_sharded.cost.exchange_curves import EvenVolumes, ExchangeCurves
from dlrm_sharded.cost.exchange_terms import Hosts
from dlrm_sharded.cost.workload import Floats
from dlrm_sharded.hardware.gpus.collectives import HostCollectives
from dlrm_sharded.hardware.gpus.gpu_specs import gpu_specs

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
