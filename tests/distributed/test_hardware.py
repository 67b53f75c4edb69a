"""The hardware that the ranks of a job detect together."""

import pytest

from dlrm_sharded.hardware.detect import detect_hardware
from dlrm_sharded.ranks.distributed import Rank
from tests.preloaded.ranks import gathered, run_ranks

pytestmark = pytest.mark.slow


def detected(rank: Rank) -> list[list[float]]:
    """The figures of each rank, detected twice: without and perhaps with what a cache keeps."""
    figures = []
    for _ in range(2):
        hardware = detect_hardware(rank)
        exchange = hardware.probe.exchange
        figures += [exchange.num_ranks, exchange.ranks_per_host, exchange.latency_us]
        figures += [exchange.gb_per_s, hardware.probe.gather_gb_per_s]
    return gathered(rank, figures)


def test_all_ranks_have_the_figures_of_rank_0(tmp_path, monkeypatch):
    monkeypatch.setenv("DLRM_SHARDED_CACHE", str(tmp_path))
    first, second = run_ranks(detected, 2, local_world_size=1)
    assert first == second
    assert first[:2] == [2, 1]
    assert min(first) > 0
