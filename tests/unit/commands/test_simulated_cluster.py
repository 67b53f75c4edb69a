"""The config of a simulation decides how the dense part is priced."""

from unittest.mock import MagicMock

import pytest

from dlrm_sharded.commands.simulated_cluster import build_cluster
from dlrm_sharded.commands.step_model import build_dense
from dlrm_sharded.files.errors import ConfigError
from dlrm_sharded.files.json_files import write_json
from dlrm_sharded.job.settings import JobSettings
from dlrm_sharded.plans.tables import Table
from dlrm_sharded.plans.task import ShardingTask, Topology
from tests.unit.commands.conftest import composed_config


@pytest.mark.parametrize(("mode", "compiled"), [("default", True), ("null", False)])
def test_compiled_layers_take_less_of_the_host(mode, compiled):
    cfg = composed_config("simulate", f"model.compile_mode={mode}")
    assert build_dense(cfg, 13, MagicMock()).compiled == compiled


def test_sequences_are_priced_or_measured(tmp_path):
    task = tmp_path / "task.json"
    tables = (Table("clicks", 100, 16, 5.0, pooled=False),)
    write_json(task, ShardingTask(tables, Topology(2, 10**6), 64).to_json())
    for hardware in ("here", "h100"):
        built = build_cluster(composed_config("simulate", f"task={task}", f"hardware={hardware}"))
        assert not built.task.tables[0].pooled


def test_the_trainer_refuses_sequences():
    tables = (Table("clicks", 100, 16, 5.0, pooled=False),)
    settings = MagicMock(dataset=MagicMock(tables=tables))
    with pytest.raises(ConfigError, match=r"'clicks' is a sequence .* ShardedPlanner"):
        JobSettings.task(settings, Topology(2, 10**6))
