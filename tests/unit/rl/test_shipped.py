"""The packaged policies, on tables that they were not trained on."""

import logging

import numpy as np
import pytest

from dlrm_sharded import RunContext, Sharder, SharderContext, learned_cost_model, validate
from dlrm_sharded.datasets.table_kinds import TABLE_KINDS
from dlrm_sharded.rl.learned_policy import METHODS
from dlrm_sharded.sharders.heuristics import WEIGHTS, GreedySharder
from dlrm_sharded.sharders.policy import policy_sharder
from tests.unit.rl.cases import yaml_pool

NUM_TASKS = 10


@pytest.mark.parametrize(("num_tables", "world_size"), [(50, 4), (60, 8)])
@pytest.mark.parametrize("method", METHODS)
def test_is_below_every_heuristic(
    method: str, num_tables: int, world_size: int, caplog, monkeypatch
) -> None:
    caplog.set_level(logging.ERROR)
    for kind, tables in TABLE_KINDS.items():  # fewer tables to profile, of the whole range
        monkeypatch.setitem(TABLE_KINDS, kind, lambda half, tables=tables: tables(half)[::10])
    model = learned_cost_model(RunContext())
    pool = yaml_pool(part="unseen", num_tables=num_tables, world_size=world_size)
    rng = np.random.default_rng(1)
    tasks = [pool.task(pool.draw(rng)) for _ in range(NUM_TASKS)]

    def mean_ms(sharder: Sharder) -> float:
        plans = [sharder.shard(task) for task in tasks]
        for plan, task in zip(plans, tasks, strict=True):
            validate(plan, task)
        return np.mean([model.predict(*of).cost_ms for of in zip(plans, tasks, strict=True)])

    policy_ms = mean_ms(policy_sharder(SharderContext(), method=method, num_samples=0))
    heuristics_ms = {weight: mean_ms(GreedySharder(weight)) for weight in WEIGHTS}
    assert policy_ms < min(heuristics_ms.values())
