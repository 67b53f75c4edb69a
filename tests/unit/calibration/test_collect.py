"""The collector: its groups of ranks, its time, and the other work that it sees."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.testing._internal.distributed.fake_pg import FakeStore

from dlrm_sharded.accesses.patterns import ZipfAccesses
from dlrm_sharded.calibration import collect as module
from dlrm_sharded.calibration.collect import _groups, _Measurer, collect, group_sizes
from dlrm_sharded.calibration.disturbance import Disturbance
from dlrm_sharded.calibration.drawn_plans import DrawnPlan
from dlrm_sharded.calibration.plan_limits import FIRST_RUN, PlanSizes
from dlrm_sharded.calibration.samples import Sample
from dlrm_sharded.files.errors import ConfigError
from dlrm_sharded.measuring import bench as bench_module
from dlrm_sharded.measuring.drawn_table import DrawnTable
from dlrm_sharded.measuring.measure import MeasuredCost, MeasuredModule
from dlrm_sharded.plans.plan_cost import STAGES, PlanCost
from dlrm_sharded.ranks.distributed import Rank

CPU = torch.device("cpu")
SMALL = PlanSizes({"cpu": 0.001}, {"cpu": 500}, memory_share=0.01)


@pytest.mark.parametrize(
    ("world_size", "local_world_size", "sizes"),
    [
        (1, 1, []),
        (2, 2, [2]),
        (3, 3, [3, 2]),
        (6, 6, [6, 4, 2]),
        (8, 4, [8, 4, 2]),
        (6, 3, [6, 2]),
        (24, 6, [24, 4, 2]),
    ],
)
def test_groups_are_parts_of_a_host_or_whole_hosts(
    world_size: int, local_world_size: int, sizes: list[int]
) -> None:
    rank = Rank(0, world_size, 0, local_world_size, torch.device("cuda", 0))
    assert group_sizes(rank) == (local_world_size, sizes)
    computing, exchanging = group_sizes(Rank(0, world_size, 0, local_world_size, CPU))
    assert 1 <= computing <= local_world_size
    assert exchanging == sizes


def costs_of(group: dist.ProcessGroup | None) -> MeasuredCost:
    times_ms = {stage: [1.0] * dist.get_world_size(group) for stage in STAGES}
    ids_ms = [1.0] * dist.get_world_size(group)
    return MeasuredCost(PlanCost.from_stages(times_ms, input_dist_ms=ids_ms), {}, 3)


def groups_of(rank: int, monkeypatch: pytest.MonkeyPatch) -> tuple[list[list[int]], list[int]]:
    """The groups that one of 8 ranks makes, and the sizes of those in which it measures."""
    made: list[list[int]] = []
    measured_with: list[int] = []
    new_group = distributed_c10d.new_group

    def recorded(ranks: Sequence[int], *args: Any, **kwargs: Any) -> Any:
        made.append(list(ranks))
        return new_group(ranks, *args, **kwargs)

    def measured(
        modules: Sequence[MeasuredModule], *args: Any, group: dist.ProcessGroup
    ) -> MeasuredCost:
        for sharded in modules:
            env = sharded.embeddings._env
            assert env.process_group is group
            assert (env.world_size, env.rank) == (dist.get_world_size(group), rank)
        measured_with.append(dist.get_world_size(group))
        return costs_of(group)

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=8)
    try:
        with monkeypatch.context() as patch:
            for place in (dist, distributed_c10d, torch.distributed.device_mesh):
                patch.setattr(place, "new_group", recorded)
            patch.setattr(bench_module, "measure_modules", measured)
            me = Rank(rank, 8, rank, 4, CPU)
            measurer = _Measurer(me, "sgd", computing=1, table_bytes=1000)
            with _groups(me, {2, 4, 8}) as groups:
                for size, group in groups.items():
                    tables = tuple(DrawnTable(9, 4, 1.0, ZipfAccesses(0.0), r) for r in range(size))
                    plan = DrawnPlan("communication", size, 8, tables)
                    sample, _ = measurer.measure(plan, 7, np.random.default_rng(0), group)
                    assert (sample.number, sample.world_size) == (7, size)
                    assert sample.ranks_per_host == min(size, 4)
    finally:
        dist.destroy_process_group()
    return made, measured_with


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, in what TorchRec loads
def test_all_ranks_make_all_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL makes a group by splitting that of all ranks, which all of them have to do together."""
    by_rank = [groups_of(rank, monkeypatch) for rank in range(8)]
    sizes = [2, 4, 8]
    assert [made for made, _ in by_rank] == [[list(range(n)) for n in sizes]] * 8
    assert [used for _, used in by_rank] == [[n for n in sizes if rank < n] for rank in range(8)]


class Machine:
    """A rank alone, on which a measurement takes a second, and others have its core for a share."""

    def __init__(self, rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = self.waited_s = self.core_wait = self.load = 0.0
        self.slowed_gpu: str | None = None
        self._rank = rank

        def measured(*args: Any, group: dist.ProcessGroup) -> MeasuredCost:
            self.now_s, self.waited_s = self.now_s + 1, self.waited_s + self.core_wait
            return costs_of(group)

        def conclude(watch: object) -> Any:
            return SimpleNamespace(
                hosts={"here": self.load}, core_wait=self.core_wait, slowed_gpu=self.slowed_gpu
            )

        clock = SimpleNamespace(perf_counter=lambda: self.now_s)
        monkeypatch.setattr(bench_module, "measure_modules", measured)
        monkeypatch.setattr(module, "time", clock)
        monkeypatch.setattr(module, "core_wait_s", lambda: self.waited_s)
        monkeypatch.setattr(module, "has_core_for_each", lambda rank: True)
        monkeypatch.setattr(module.LoadWatch, "conclude", conclude)

    def collect(self, **options: Any) -> tuple[list[Sample], list[Disturbance], str | None]:
        """Collect for 10 s, which are measurements; return what was noted, and what was seen."""
        noted: list[tuple[Sample, Disturbance]] = []
        options = {
            "note": lambda *measured: noted.append(measured),
            "optimizer": "sgd",
            "sizes": SMALL,
            "budget_s": 10.0,
            "batch_sizes": [64],
        } | options
        found = collect(self._rank, **options)
        return [sample for sample, _ in noted], [load for _, load in noted], found


@pytest.fixture
def machine(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(rank, monkeypatch)


def test_measures_new_plans_until_the_time_is_over(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples, loads, other_work = machine.collect()
    assert [sample.number for sample in samples] == list(range(10))
    assert {sample.kind for sample in samples} == {"computation"}
    assert len({sample.shards for sample in samples}) == 10
    assert set(loads) == {Disturbance()}
    assert other_work is None
    assert machine.collect()[0] == samples, "the number and the seed say all"
    more = machine.collect(first=10)[0]
    assert [sample.number for sample in more] == list(range(10, 20))
    assert not {sample.shards for sample in more} & {sample.shards for sample in samples}
    assert machine.collect(seed=1)[0] != samples
    show = Mock()
    monkeypatch.setattr(module.ProgressBar, "set_postfix_str", show)
    assert len(machine.collect(budget_s=0.01)[0]) == 1
    show.assert_called_once_with("0 of 0 s, 1 plans", refresh=False)


def test_other_work_is_noted_and_said(machine: Machine) -> None:
    machine.core_wait = 0.4
    _, loads, other_work = machine.collect()
    assert [load.core_wait for load in loads] == pytest.approx([0.4] * 10)
    assert other_work == "other processes had the core of a rank for 40 % of the time"
    machine.core_wait, machine.load = 0.05, 1e4
    assert machine.collect()[2].startswith("the load average was 10000.0 on ")
    machine.load, machine.slowed_gpu = 0.0, "the GPU of rank 0 was hot"
    assert machine.collect()[2] == "the GPU of rank 0 was hot"


def test_a_sample_that_cannot_be_noted_ends_it(machine: Machine) -> None:
    def refuse(*measured: object) -> None:
        raise ConfigError("the disk is full")

    with pytest.raises(ConfigError, match="the disk is full"):
        machine.collect(note=refuse)
    assert machine.now_s == 1


def test_first_runs_are_short(machine: Machine) -> None:
    samples, *_ = machine.collect(sizes=FIRST_RUN)
    for sample in samples:
        assert sum(64 * shard.pooling_factor for shard in sample.shards) <= 300_001
