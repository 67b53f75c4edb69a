"""Plans that a run refuses although they are valid."""

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from dlrm_sharded.commands.run_plan import plan_run
from dlrm_sharded.commands.start import Start
from dlrm_sharded.errors import ConfigError
from dlrm_sharded.json_files import write_json
from dlrm_sharded.layouts import Replicas
from dlrm_sharded.plan import Shard, ShardingPlan
from dlrm_sharded.planning import Planner
from dlrm_sharded.sharders.plan_file import PlanFileSharder
from dlrm_sharded.tables import Table
from dlrm_sharded.task import ShardingTask, Topology

TABLES = (Table("a", 50, 8, 1.0), Table("b", 40, 8, 1.0))


def test_adam_trains_no_replicas(tmp_path: Path) -> None:
    """Nothing but the plan exists when it is refused."""
    shards = (*Replicas(2).shards(TABLES[0]), Shard.whole(TABLES[1], 1))
    write_json(tmp_path / "plan.json", ShardingPlan(2, shards).to_json())
    planner = Planner(PlanFileSharder(tmp_path / "plan.json"), cost_model=None)
    task = ShardingTask(TABLES, Topology(2, 10**6), 64)
    for embedding in ("sgd", "rowwise_adagrad"):
        cfg = OmegaConf.create({"optimizer": {"embedding": embedding}})
        assert plan_run(planner, task, Start("run"), cfg).plan.shards == shards
    cfg = OmegaConf.create({"optimizer": {"embedding": "adam"}})
    with pytest.raises(ConfigError, match="no table can be replicated"):
        plan_run(planner, task, Start("run"), cfg)
