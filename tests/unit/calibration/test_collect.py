"""What is collected, and when: whenever a collection ends, what it has is a fair part."""

import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from dlrm_sharded.calibration.collect import CollectConfig, _conditions, collect
from dlrm_sharded.calibration.plan_sizes import GPU_SIZES
from dlrm_sharded.calibration.schedule import KINDS, Slot, group_sizes, schedule
from dlrm_sharded.files.errors import ConfigError
from dlrm_sharded.ranks.distributed import Rank
from tests.unit.hardware.made_up import HARDWARE, ON_GPU, with_cpu


def slots(
    num_samples: int,
    communication_ranks: tuple[int, ...] = (2, 4),
    *,
    computation_ranks: int = 2,
    repeat_every: int = 19,
    num_repeats: int = 1,
) -> list[Slot]:
    return list(
        schedule(
            num_samples,
            computation_ranks,
            communication_ranks,
            repeat_every=repeat_every,
            num_repeats=num_repeats,
        )
    )


@pytest.mark.parametrize("num_samples", [1, 2, 5, 19, 20, 99, 100, 101, 2000])
def test_every_plan_once_and_some_again(num_samples: int) -> None:
    planned = slots(num_samples)
    first = [slot.number for slot in planned if slot.attempt == 0]
    again = [slot.number for slot in planned if slot.attempt == 1]
    assert first == list(range(num_samples))
    assert again == sorted(set(again))
    assert {slot.attempt for slot in planned} == {0, 1}
    assert 1 <= len(again) <= num_samples / 19 + 1
    if num_samples > 200:
        assert len(again) / num_samples == pytest.approx(0.05, abs=0.005)


@pytest.mark.parametrize("num_samples", [2, 20, 101, 2000])
@pytest.mark.parametrize("num_repeats", [0, 1, 3])
def test_what_is_measured_again_is_the_same_plan_later(num_samples: int, num_repeats: int) -> None:
    planned = slots(num_samples, num_repeats=num_repeats)
    place = {(slot.number, slot.attempt): i for i, slot in enumerate(planned)}
    assert len(place) == len(planned)
    assert {slot.attempt for slot in planned} == set(range(num_repeats + 1))
    for slot in planned:
        if slot.attempt > 0:
            before = planned[place[slot.number, slot.attempt - 1]]
            assert (before.kind, before.world_size) == (slot.kind, slot.world_size)
            lag = place[slot.number, slot.attempt] - place[slot.number, slot.attempt - 1]
            assert lag > 0
            if slot.number + slot.attempt * 100 < num_samples:
                assert lag >= 100


@pytest.mark.parametrize(
    "sizes",
    [(2,), (2, 4), (2, 4, 8), (2, 4, 8, 16, 32), (2, 4, 6, 8, 16, 48)],
    ids=lambda sizes: f"up_to_{sizes[-1]}",
)
def test_any_prefix_is_a_fair_part(sizes: tuple[int, ...]) -> None:
    planned = [slot for slot in slots(300, sizes) if slot.attempt == 0]
    share = KINDS.count("computation") / len(KINDS)
    assert 0.5 <= share <= 0.8
    for stop in range(1, len(planned) + 1):
        kinds = Counter(slot.kind for slot in planned[:stop])
        assert abs(kinds["computation"] - share * stop) < 2
        sizes_so_far = [s.world_size for s in planned[:stop] if s.kind == "communication"]
        counts = [sizes_so_far.count(size) for size in sizes]
        assert max(counts) - min(counts) <= 1
        assert sum(counts) == len(sizes_so_far)


def test_one_rank_alone_only_computes() -> None:
    planned = slots(50, (), computation_ranks=1)
    assert {(slot.kind, slot.world_size) for slot in planned} == {("computation", 1)}


@pytest.mark.parametrize(
    ("world_size", "local_world_size", "sizes"),
    [
        (1, 1, []),
        (2, 2, [2]),
        (3, 3, [2, 3]),
        (6, 6, [2, 4, 6]),
        (8, 4, [2, 4, 8]),
        (6, 3, [2, 6]),
        (24, 6, [2, 4, 24]),
    ],
)
def test_groups_are_parts_of_a_host_or_whole_hosts(
    world_size: int, local_world_size: int, sizes: list[int]
) -> None:
    rank = Rank(0, world_size, 0, local_world_size, torch.device("cuda", 0))
    assert group_sizes(rank) == (world_size, sizes)
    on_cpu = Rank(0, world_size, 0, local_world_size, torch.device("cpu"))
    computing, communicating = group_sizes(on_cpu)
    assert 1 <= computing <= local_world_size
    assert communicating == sizes


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "negative_budget": ({"time_budget_s": -5}, "time_budget_s is -5, must be a number > 0"),
    "no_budget": ({"time_budget_s": 0}, "time_budget_s is 0"),
    "endless_budget": ({"time_budget_s": float("inf")}, "time_budget_s is inf"),
    "no_samples": ({"num_samples": 0}, "num_samples is 0, must be an integer >= 1"),
    "half_a_sample": ({"num_samples": 0.5}, "num_samples is 0.5"),
    "negative_seed": ({"seed": -1}, "seed is -1"),
    "no_batch_sizes": ({"batch_sizes": []}, "batch_sizes is empty"),
    "empty_batch": ({"batch_sizes": [64, 0]}, "a size in batch_sizes is 0"),
    "no_memory": ({"table_gib": 0.0}, "table_gib is 0.0"),
    "no_ids": ({"ids_per_step": 0}, "ids_per_step is 0"),
    "repeats_of_none": ({"repeat_every": 0}, "repeat_every is 0"),
    "negative_repeats": ({"num_repeats": -1}, "num_repeats is -1"),
    "unknown_optimizer": ({"optimizer": "adamw"}, "optimizer is 'adamw'; known: sgd, rowwise_"),
}


@pytest.mark.parametrize(("changes", "message"), BAD.values(), ids=BAD)
def test_bad_settings(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CollectConfig(**changes)


def test_batches_divide_by_the_ranks(tmp_path: Path) -> None:
    rank = Rank(0, 2, 0, 2, torch.device("cpu"))
    with pytest.raises(ConfigError, match="batch_sizes has 33, which does not divide by 2 ranks"):
        collect(CollectConfig(batch_sizes=(64, 33)), tmp_path / "costs.parquet", rank)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("device", "names_cores"), [("cpu", True), ("cuda", False)])
def test_only_a_collection_on_a_cpu_depends_on_its_cores(
    device: str, names_cores: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU, a collection is resumed in another set of cores."""
    rank = Rank(0, 2, 0, 2, torch.device(device, 0))
    hardware = ON_GPU if device == "cuda" else HARDWARE
    before = _conditions(CollectConfig(), GPU_SIZES, rank, hardware)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(1000)))
    after = _conditions(CollectConfig(), GPU_SIZES, rank, with_cpu(hardware, cores=1000))
    assert ({"cores", "threads"} <= before.keys()) == names_cores
    assert (before != after) == names_cores
    assert before["batch_sizes"] == GPU_SIZES.batch_sizes
    assert before["table_gib"] == GPU_SIZES.table_gib
