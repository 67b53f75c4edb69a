"""The groups in which plans are measured, on every rank of a job that is made up in one process."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.testing._internal.distributed.fake_pg import FakeStore

from dlrm_sharded.calibration import random_plans, undisturbed
from dlrm_sharded.calibration.collect import CollectConfig, PlanMeasurer
from dlrm_sharded.calibration.plan_sizes import PlanSizes
from dlrm_sharded.calibration.schedule import Slot, group_sizes
from dlrm_sharded.measuring import bench as bench_module
from dlrm_sharded.measuring.measure import MeasuredCost, MeasuredModule
from dlrm_sharded.plans.plan_cost import STAGES, PlanCost
from dlrm_sharded.ranks.distributed import Rank

WORLD_SIZE, LOCAL_WORLD_SIZE = 8, 4
SIZES = PlanSizes(batch_sizes=(64,), table_gib=0.001, ids_per_step=500)


def groups_of(rank: int, monkeypatch: pytest.MonkeyPatch) -> tuple[list[list[int]], list[int]]:
    """The groups that a rank makes while it measures on groups of every size, and their sizes."""
    made: list[list[int]] = []
    measured_with: list[int] = []
    new_group = distributed_c10d.new_group

    def recorded(ranks: Sequence[int], *args: Any, **kwargs: Any) -> Any:
        made.append(list(ranks))
        return new_group(ranks, *args, **kwargs)

    def measured(
        modules: Sequence[MeasuredModule], *args: Any, group: dist.ProcessGroup
    ) -> MeasuredCost:
        world_size = dist.get_world_size(group)
        for module in modules:
            env = module.embeddings._env
            assert env.process_group is group
            assert (env.world_size, env.rank) == (world_size, rank)
        measured_with.append(world_size)
        times_ms = {stage: [1.0] * world_size for stage in STAGES}
        cost = PlanCost.from_stages(times_ms, input_dist_ms=[1.0] * world_size)
        return MeasuredCost(cost, {}, 3)

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=WORLD_SIZE)
    try:
        with monkeypatch.context() as patch:
            for module in (dist, distributed_c10d, torch.distributed.device_mesh):
                patch.setattr(module, "new_group", recorded)
            patch.setattr(bench_module, "measure_modules", measured)
            patch.setattr(undisturbed, "core_wait_s", lambda: 0.0)  # else it may be repeated
            # a module of sequences gathers what each rank holds, which the made-up group cannot
            patch.setattr(random_plans, "SEQUENCE_SHARE", 0.0)
            me = Rank(rank, WORLD_SIZE, rank, LOCAL_WORLD_SIZE, torch.device("cpu"))
            _, sizes = group_sizes(me)
            measurer = PlanMeasurer(CollectConfig(), SIZES, me, set(sizes))
            for number, size in enumerate(sizes):
                sample = measurer.measure(Slot("communication", number, 0, size))
                assert (sample is not None) == (rank < size)
    finally:
        dist.destroy_process_group()
    return made, measured_with


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, in what TorchRec loads
def test_all_ranks_make_all_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL makes a group by splitting that of all ranks, which all of them have to do together."""
    by_rank = [groups_of(rank, monkeypatch) for rank in range(WORLD_SIZE)]
    sizes = [2, 4, 8]
    assert [made for made, _ in by_rank] == [[list(range(n)) for n in sizes]] * WORLD_SIZE
    assert [used for _, used in by_rank] == [
        [n for n in sizes if rank < n] for rank in range(WORLD_SIZE)
    ]
