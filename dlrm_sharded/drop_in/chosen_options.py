"""A plan of ours as the options that TorchRec's planner would have chosen, with memory and times.

TorchRec's reports take the peak memory of a rank and the time of a step from them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from torch import nn
from torchrec.distributed.planner.enumerators import get_partition_by_type
from torchrec.distributed.planner.types import Perf, ShardingOption, Storage
from torchrec.distributed.planner.types import Shard as TorchRecShard
from torchrec.distributed.types import ModuleSharder
from torchrec.distributed.types import ShardingPlan as TorchRecPlan

from dlrm_sharded.drop_in.find_tables import shardable
from dlrm_sharded.drop_in.model_report import ModelReport
from dlrm_sharded.plans.plan import Shard


def chosen_options(
    model: nn.Module,
    sharders: Sequence[ModuleSharder[Any]],
    plan: TorchRecPlan,
    report: ModelReport,
) -> list[ShardingOption]:
    """Return an option for each table of a plan.

    A rank's predicted stages are divided among its shards by the bytes that they look up, so that
    their sum over a rank's shards is our prediction. Without a cost model, shards have no times.
    """
    task, options = report.task, []
    tables = {table.name: table for table in task.tables}
    by_table, perf = report.plan.shards_by_table(), _perf_of_shards(report)
    for path, module, sharder in shardable(model, sharders):
        for name, weight in sharder.shardable_parameters(module).items():
            table = tables[report.table_names[path, name]]
            placed = plan.plan[path][name]
            options.append(
                ShardingOption(
                    name=name,
                    tensor=weight,
                    module=(path, module),
                    input_lengths=[table.pooling_factor / table.num_features] * table.num_features,
                    batch_size=task.batch_size // task.topology.world_size,
                    sharding_type=placed.sharding_type,
                    partition_by=get_partition_by_type(placed.sharding_type),
                    compute_kernel=placed.compute_kernel,
                    shards=[_shard(each, report, perf.get(each)) for each in by_table[table.name]],
                    is_pooled=table.pooled,
                )
            )
    return options


def _shard(shard: Shard, report: ModelReport, perf: Perf | None) -> TorchRecShard:
    """Return TorchRec's form of a shard, with the memory of its weights and optimizer state."""
    topology, size = report.task.topology, [shard.num_rows, shard.num_cols]
    num_bytes = topology.shard_bytes(
        shard.table, *size, replicated=shard.replicated, precision=shard.precision
    )
    on_cpu = topology.compute_device == "cpu"
    storage = Storage(hbm=0 if on_cpu else num_bytes, ddr=num_bytes if on_cpu else 0)
    return TorchRecShard(size, [shard.rows[0], shard.cols[0]], storage, perf, shard.rank)


def _perf_of_shards(report: ModelReport) -> dict[Shard, Perf]:
    """Return the times of all shards in ms; nothing without a cost model."""
    cost, world_size = report.details.cost, report.plan.world_size
    if cost is None:
        return {}
    tables = {table.name: table for table in report.task.tables}
    read: dict[Shard, float] = {}
    by_rank: dict[int, float] = defaultdict(float)
    for shard in report.plan.shards:
        table = tables[shard.table]
        # Each rank looks up its own samples only in a replica.
        samples = 1 / world_size if shard.replicated else 1.0
        num_ids = samples * table.pooling_factor * shard.num_rows / table.num_embeddings
        read[shard] = num_ids * shard.num_cols
        by_rank[shard.rank] += read[shard]
    perf = {}
    for shard, own in read.items():
        share, rank = own / by_rank[shard.rank], cost.per_rank[shard.rank]
        compute, exchange = share * rank.fwd_compute_ms, share * rank.fwd_comm_ms
        update, gradients = share * rank.bwd_compute_ms, share * rank.bwd_comm_ms
        perf[shard] = Perf(compute, exchange, update, gradients)
    return perf
