"""The task and the cost model of the worked example in docs/notes/lower_bound.md."""

import numpy as np

from dlrm_sharded import ShardingTask, Table
from dlrm_sharded.cost.communication import EXCHANGES, CommunicationModel
from dlrm_sharded.cost.compute import ComputeModel, CostNet
from dlrm_sharded.cost.exchange_terms import EXCHANGE_TERMS, LINKS, REDUCE_TERMS
from dlrm_sharded.cost.features import CPU_WORK, EXTENT, PROFILE, DeviceWork
from dlrm_sharded.cost.learned import LearnedCostModel
from tests.unit.synthetic import USED_ONCE, task_of

LAUNCH_MS, IDS_MS, ID_COLUMNS_MS = 0.05, 0.1, 0.2
EXCHANGE_MS, BUSIER_MS_PER_MB, REDUCE_MS = 0.1, 10.0, 1.0
NOTHING = -60.0
"""Logarithm of a cost that is far below rounding."""


def worked_task() -> ShardingTask:
    """Two tables on two ranks; every id is used once in a batch."""
    tables = (Table("a", 1000, 16, 10.0, USED_ONCE), Table("b", 1000, 8, 4.0, USED_ONCE))
    return task_of(tables, memory_bytes=2**30, batch_size=1000)


def worked_model() -> LearnedCostModel:
    """Costs that do not depend on the access profile, and no cache that overflows."""
    exchange = np.zeros((len(EXCHANGES), len(EXCHANGE_TERMS)))
    exchange[0, EXCHANGE_TERMS.index("one")] = EXCHANGE_MS
    exchange[0, EXCHANGE_TERMS.index("max_busier_intra")] = BUSIER_MS_PER_MB
    reduce = np.zeros((len(EXCHANGES), len(REDUCE_TERMS)))
    reduce[0, REDUCE_TERMS.index("one")] = REDUCE_MS
    num_profile = len(PROFILE)
    compute = ComputeModel(
        profile_mean=np.zeros(num_profile),
        profile_std=np.ones(num_profile),
        profile_low=np.zeros(num_profile),
        profile_high=np.ones(num_profile),
        forward=constant_net({"ids": IDS_MS, "id_columns": ID_COLUMNS_MS}, CPU_WORK, LAUNCH_MS),
        backward=constant_net({}, CPU_WORK),
    )
    return LearnedCostModel(
        compute,
        CommunicationModel(exchange, reduce),
        name="worked example",
        device="cpu",
        ranges=dict.fromkeys(EXTENT, (0.0, 1e18)),
        measured_links=LINKS,
    )


def constant_net(
    costs: dict[str, float], work: DeviceWork, launch_ms: float = 0.0, next_launch_ms: float = 0.0
) -> CostNet:
    """Costs by work term, in ms per thousand; the net's weights are zero, so its biases remain."""
    log_costs = [np.log(costs[term]) if term in costs else NOTHING for term in work.terms]
    num_terms = len(work.terms)
    return CostNet(
        weights=(np.zeros((len(PROFILE), 1)), np.zeros((1, num_terms))),
        biases=(np.zeros(1), np.array(log_costs)),
        cache_gain=np.zeros((num_terms, 1)),
        cache_mb=np.zeros(1),
        cache_slope=np.ones(1),
        launch_ms=launch_ms,
        next_launch_ms=next_launch_ms,
    )
