"""Damaged checkpoints are recognized, and the run goes on with the one before."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from dlrm_sharded.ranks.distributed import Rank, process_group
from tests.soak import damage

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def rank() -> Iterator[Rank]:
    with process_group() as me:
        yield me


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with three checkpoints."""
    return damage.train(tmp_path_factory.mktemp("runs") / "whole")


def test_every_kind_of_damage(whole, rank):
    rng = random.Random(0)
    assert len(damage.DAMAGES) > 20
    for kind in damage.DAMAGES:
        assert damage.damaged(whole, kind, rng, rank).faults == []


def test_flipped_bits(whole):
    assert damage.missed_flips(whole, 40, random.Random(1)) == 0


def test_a_whole_run_goes_on_with_the_checkpoint_before(whole):
    assert damage.whole_run_faults(whole, "a bit of a part's numbers") == []
