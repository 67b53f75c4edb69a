"""TorchRec's planner as a sharder: what it says where it finds nothing."""

import pytest

from dlrm_sharded.errors import ConfigError, InfeasibleTaskError
from dlrm_sharded.sharders.torchrec_planner import TorchRecSharder
from dlrm_sharded.tables import Table
from dlrm_sharded.task import ShardingTask, Topology


@pytest.mark.parametrize("told", [True, False])
def test_names_the_users_table(told: bool) -> None:
    tables = (Table("user.id", 10, 16, 1.0), Table("item.id", 10_000, 16, 1.0))
    task = ShardingTask(tables, Topology(2, 100_000, compute_device="cpu"), batch_size=64)
    with pytest.raises(InfeasibleTaskError, match=r"item\.id"):
        TorchRecSharder(told=told).shard(task)


@pytest.mark.parametrize(
    "options", [{"min_partition": 6}, {"min_partition": 0}, {"timeout_s": 0}, {"timeout_s": "abc"}]
)
def test_bad_options(options: dict[str, int]) -> None:
    (key,) = options
    with pytest.raises(ConfigError, match=f"sharder.{key}"):
        TorchRecSharder(**options)
