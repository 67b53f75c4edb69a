"""A simulated run of a few tables, without a measurement."""

from dlrm_sharded.cost.cluster import Cluster
from dlrm_sharded.dense.trace import DenseMemory
from dlrm_sharded.plans.plan import Shard, ShardingPlan
from dlrm_sharded.plans.plan_cost import PlanCost, StageCost
from dlrm_sharded.plans.plan_report import PlanReport
from dlrm_sharded.plans.tables import Table
from dlrm_sharded.plans.task import GIB, ShardingTask, Topology
from dlrm_sharded.simulation.planned import Planned
from dlrm_sharded.simulation.ranks import RankTimes
from dlrm_sharded.simulation.run import SimulatedRun, simulate
from dlrm_sharded.step.core_sharing import CoreSharing
from dlrm_sharded.step.parts import DenseTimes
from dlrm_sharded.step.prediction import DensePart
from dlrm_sharded.step.schedule import SERIAL, Overlap
from dlrm_sharded.training.memory import Workload

SLOWEST = 5
"""Rank that the others wait for."""


def made_up_run(
    world_size: int = 8,
    *,
    overlap: Overlap = SERIAL,
    sharing: CoreSharing | None = None,
    launch_ms: float | None = None,
    lookups_host_ms: float = 0.0,
    sharder: str = "dim",
) -> SimulatedRun:
    """Every rank has a table, and `SLOWEST` computes three times as long as the others.

    Args:
        launch_ms: host time of the dense part on GPUs, by a data sheet; None for ranks on CPUs.
        lookups_host_ms: host time of the lookups of `SLOWEST`; 0 if that was not measured.
    """
    tables = tuple(Table(f"t{rank}", 1000, 16, 2.0) for rank in range(world_size))
    topology = Topology(
        world_size,
        memory_bytes=GIB,
        local_world_size=world_size // 2,
        compute_device="cpu" if launch_ms is None else "cuda",
    )
    task = ShardingTask(tables, topology, 64 * world_size)
    plan = ShardingPlan(
        world_size, tuple(Shard.whole(table, rank) for rank, table in enumerate(tables))
    )
    cost = PlanCost((StageCost(1.0, 2.0, 2.0, 2.0),) * world_size, (1.0,) * world_size)
    times = [
        RankTimes(StageCost(30.0, 0.0, 0.0, 60.0), "measured", host_ms=lookups_host_ms)
        if rank == SLOWEST
        else RankTimes(StageCost(10.0, 0.0, 0.0, 20.0), "scaled")
        for rank in range(world_size)
    ]
    dense = DenseTimes(
        data_ms=1.0,
        bottom_forward_ms=2.0,
        top_forward_ms=3.0,
        top_backward_ms=4.0,
        bottom_backward_ms=2.0,
        optimizer_ms=1.0,
        launch_ms=launch_ms or 0.0,
        spread=0.02,
    )
    workload = Workload(
        dense=DenseMemory(1000, 0, 5000),
        dense_state_bytes=1000,
        num_dense=13,
        num_measured_batches=0,
        num_eval_samples=0,
    )
    error = 0.0 if launch_ms is None else 0.5
    part = DensePart((dense,) * world_size, 1.5, error)
    cluster = Cluster(task, part, overlap, seed=0, sharing=sharing)
    planned = Planned(sharder, plan, PlanReport(sharder, 0.1, cost))
    return simulate(planned, times, cluster, workload)
