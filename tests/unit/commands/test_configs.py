"""Every yaml of conf/ composes and builds; a new one is tested as soon as it is there."""

import dataclasses
import inspect
import re
import tracemalloc
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra.errors import ConfigCompositionException
from hydra.utils import instantiate
from omegaconf import OmegaConf

from dlrm_sharded.commands import train_policy
from dlrm_sharded.commands.asked_task import asked_task, build_dataset
from dlrm_sharded.commands.hydra_app import instantiate as build
from dlrm_sharded.commands.sharders import drop_keys_of_replaced_class, planner_factory
from dlrm_sharded.commands.yamls import CONF_DIR
from dlrm_sharded.cost.learned import LearnedCostModel
from dlrm_sharded.files.errors import ConfigError
from dlrm_sharded.files.json_forms import form_of
from dlrm_sharded.hardware.context import RunContext
from dlrm_sharded.model.dlrm import Dlrm
from dlrm_sharded.model.optimizers import OptimizerConfig
from dlrm_sharded.plans.plan import ShardingPlan
from dlrm_sharded.plans.tables import Table
from dlrm_sharded.plans.task import GIB, ShardingTask
from dlrm_sharded.ranks.distributed import detect_topology
from dlrm_sharded.sharders.base import SharderContext
from dlrm_sharded.sharders.heuristics import GreedySharder
from dlrm_sharded.training.trainer import TrainerConfig
from tests.unit.commands.conftest import composed_config
from tests.unit.hardware.synthetic import HARDWARE

OPTIONS = sorted(
    f"{path.parent.relative_to(CONF_DIR)}={path.stem}" for path in CONF_DIR.glob("*/*.yaml")
)
BATCH_SIZE = 96
TABLES = (Table("a", 10, 4, 1.0), Table("b", 20, 8, 2.0), Table("c", 30, 16, 0.5))
PROFILED_TABLE = Table(*("profiled", 40, 4, 1.0), reuse_histogram=(0.5, 0.5, *(0.0,) * 15))
RANDOM = "sharder._target_=dlrm_sharded.sharders.heuristics.RandomSharder"


def names(group: str) -> list[str]:
    found = [option.split("=")[1] for option in OPTIONS if option.startswith(f"{group}=")]
    assert found
    return found


@pytest.fixture(autouse=True)
def in_an_empty_folder(no_torchrun: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("option", OPTIONS)
def test_composes(option):
    group = option.split("=")[0]
    in_defaults = group in composed_config("train") or group == "experiment"
    cfg = composed_config("train", option if in_defaults else f"+{option}")
    resolved = OmegaConf.to_container(cfg, resolve=True)
    assert resolved["batch_size"] > 0


@pytest.mark.parametrize("name", names("data"))
def test_data_builds(name, tmp_path):
    """Without reading logs or holding tables: neither would fit a machine that only plans."""
    overrides = [f"data={name}", f"batch_size={BATCH_SIZE}"]
    if name == "dlrm_datasets":
        lengths = torch.ones(2, BATCH_SIZE, dtype=torch.int64)
        ids, offsets = torch.zeros(2 * BATCH_SIZE).long(), torch.arange(2 * BATCH_SIZE + 1)
        torch.save((ids, offsets, lengths), tmp_path / "data.pt")
        overrides.append(f"data.path={tmp_path / 'data.pt'}")
    if name == "table":
        schema = tmp_path / "schema.yaml"
        schema.write_text("{label: y, dense: {x: {}}, categorical: {id: {}}}")
        overrides += [f"data.schema={schema}", "data.files=there_is_none.csv"]
    cfg = composed_config("train", *overrides)
    tracemalloc.start()
    dataset = build_dataset(cfg)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert dataset.batch_size == BATCH_SIZE
    assert dataset.num_dense == (1 if name == "table" else 13)
    assert peak_bytes < 64 * 2**20
    if "blocks_dir" not in cfg.data and name != "criteo_1tb_multihot":  # whose files are not there
        assert dataset.num_batches("train") >= 1
        assert dataset.num_batches("val") >= 0


def test_the_batch_size_is_no_key_of_the_data():
    """So that the data cannot have another batch size than the plan and the throughput."""
    for path in (CONF_DIR / "data").rglob("*.yaml"):
        assert not re.search(r"^batch_size:", path.read_text(), re.M), path
    with pytest.raises(ConfigCompositionException):
        composed_config("train", "data.batch_size=16")


@pytest.mark.parametrize("batch_size", [16, 8192, "large"])
def test_a_second_batch_size_is_refused(batch_size):
    cfg = composed_config("train", f"batch_size={BATCH_SIZE}", f"+data.batch_size={batch_size}")
    with pytest.raises(
        ConfigError, match=rf"^the batch size of data is {batch_size}, but .* is 96"
    ):
        build_dataset(cfg)


def test_a_yaml_may_list_objects():
    """And Python's own lists and dicts reach the constructors, however deep they stand."""
    listed = [
        {"_target_": "dlrm_sharded.plans.tables.Table", **form_of(table)}
        for table in (*TABLES, PROFILED_TABLE)
    ]
    cfg = composed_config("train", f"batch_size={BATCH_SIZE}")
    cfg.data.tables = listed
    built = build_dataset(cfg)
    assert [table.name for table in built.tables] == ["a", "b", "c", "profiled"]
    nested = build({"_target_": "builtins.dict", "lists": {"of": [[1], listed[-1:]]}})
    assert nested == {"lists": {"of": [[1], [PROFILED_TABLE]]}}


@pytest.mark.parametrize("name", names("model"))
def test_model_builds(name):
    model = instantiate(composed_config("train", f"model={name}").model)(
        TABLES, 13, device=torch.device("cpu")
    )
    assert isinstance(model, Dlrm)
    collection = model.sparse_arch.embedding_bag_collection
    dims = {bag.name: bag.embedding_dim for bag in collection.embedding_bag_configs()}
    assert dims == {"a": 4, "b": 8, "c": 16}
    dense = [p for n, p in model.named_parameters() if "embedding_bag_collection" not in n]
    assert {p.device.type for p in dense} == {"cpu"}


@pytest.mark.parametrize("option", [o for o in OPTIONS if o.startswith(("optimizer", "trainer"))])
def test_optimizers_and_trainers_build(option):
    built = instantiate(composed_config("train", option)[option.partition("=")[0]])
    if option.startswith("trainer"):
        assert isinstance(built, TrainerConfig)
    else:
        assert isinstance(built, OptimizerConfig)
        assert built.schedule.factor(1000) == 1.0


@pytest.mark.parametrize("name", names("topology"))
def test_topology_builds(name):
    cfg = composed_config("train", f"topology={name}").topology
    topology = detect_topology(instantiate(cfg))
    assert topology.world_size == 1
    if cfg.memory_gib is not None:
        assert topology.memory_bytes == cfg.memory_gib * GIB
        assert topology.intra_host_bytes_per_s > topology.inter_host_bytes_per_s > 1e9
        reserved = detect_topology(dataclasses.replace(instantiate(cfg), reserved_gib=4.5))
        assert topology.memory_bytes - reserved.memory_bytes == 4.5 * GIB


@pytest.mark.parametrize("config", ["train", "plan"])
@pytest.mark.parametrize("name", names("sharder"))
def test_sharder_builds(name, config):
    cfg = composed_config(config, f"sharder={name}")
    for key in OmegaConf.missing_keys(cfg.sharder):
        OmegaConf.update(cfg, key, "plan.json")
    planner = planner_factory(cfg).planner(RunContext())
    assert callable(planner.sharder.shard)


class Contextual:
    """Keeps the context that it is built with."""

    def __init__(self, context: SharderContext, weight: str, seed: int = 0) -> None:
        self.context, self.name, self.seed = context, weight, seed

    def shard(self, task: ShardingTask) -> ShardingPlan:
        return GreedySharder(self.name, self.seed).shard(task)


RUN = RunContext(device="cpu", hardware=HARDWARE, optimizer="sgd")
TARGET = {"_target_": f"{Contextual.__module__}.Contextual", "_partial_": True}
CONTEXTUAL = TARGET | {"weight": "dim", "seed": 5}


def test_a_partial_sharder_is_given_its_context():
    sharder = planner_factory(OmegaConf.create({"sharder": CONTEXTUAL})).planner(RUN).sharder
    assert sharder.context == SharderContext(RUN, None)
    assert (sharder.name, sharder.seed) == ("dim", 5)
    cost_model = composed_config("train").cost_model
    planner = planner_factory(
        OmegaConf.create({"sharder": CONTEXTUAL, "cost_model": cost_model})
    ).planner(RUN)
    assert isinstance(planner.cost_model, LearnedCostModel)
    assert planner.sharder.context == SharderContext(RUN, planner.cost_model)


def test_a_complete_sharder_is_given_nothing():
    planner = planner_factory(composed_config("train", "sharder=dim", "cost_model=none")).planner(
        RUN
    )
    assert isinstance(planner.sharder, GreedySharder)
    assert (planner.cost_model, planner.diagnose) == (None, None)


@pytest.mark.parametrize("name", sorted({*names("cost_model")} - {"none"}))
def test_cost_model_waits_for_the_hardware(name):
    """Which the run alone knows; a file may be named, and is not by default."""
    cfg = composed_config("train", f"cost_model={name}").cost_model
    assert cfg.artifact is None
    parameters = inspect.signature(instantiate(cfg)).parameters.values()
    missing = {p.name for p in parameters if p.default is inspect.Parameter.empty}
    assert missing == {"context"}


def test_runs_can_do_without_a_cost_model():
    assert composed_config("train").cost_model._target_.endswith("hardware_cost_model")
    for override in ("cost_model=none", "~cost_model"):
        assert composed_config("train", override).get("cost_model") is None


def test_a_plan_is_of_a_task_or_of_data():
    cfg = composed_config("plan")
    assert OmegaConf.missing_keys(cfg) == set()
    assert cfg.task is None
    assert "data" not in cfg
    assert composed_config("plan", "task=task.json").task == "task.json"
    of_data = composed_config("plan", "data=rm1", "topology=h100_80gb", "topology.world_size=16")
    assert asked_task(of_data)[0].topology.intra_host_bytes_per_s == 450e9


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("topology.memory_gib=null", "topology.memory_gib is not set"),
        ("topology.world_size=3", "must be a multiple of the 3 ranks"),
        ("topology.reserved_gib=1", "reserve less"),
        ("topology.compute_device=tpu", "topology.compute_device"),
    ],
)
def test_what_a_plan_of_data_needs(override, message):
    cfg = composed_config("plan", "data=rm1", "topology.memory_gib=1", override)
    with pytest.raises(ConfigError, match=message):
        asked_task(cfg)


@pytest.mark.parametrize(
    ("overrides", "kept"),
    [
        (["sharder=dim"], {"_target_", "weight", "seed"}),
        (["sharder=dim", "sharder.seed=5"], {"_target_", "weight", "seed"}),
        (["sharder=dim", RANDOM], {"_target_"}),
        (["sharder=dim", RANDOM, "sharder.seed=5"], {"_target_", "seed"}),
        ([f"++{RANDOM}", "++sharder.seed=5", "+sharder.more=1"], {"_target_", "seed", "more"}),
        ([RANDOM, "+sharder.inner.depth=3"], {"_target_", "inner"}),
        ([RANDOM, "data.seed=5"], {"_target_"}),
    ],
    ids=["as_is", "key_only", "class_only", "class_and_key", "added", "nested", "not_a_sharders"],
)
def test_drops_keys_of_a_replaced_class(composed, overrides, kept):
    assert set(drop_keys_of_replaced_class(composed("train", *overrides), "sharder")) == kept


@dataclass
class OwnCosts:
    """A user's cost model."""

    ms: float

    def predict(self, plan: ShardingPlan, task: ShardingTask) -> Any: ...


def test_a_replaced_cost_model_gets_its_own_keys(composed):
    words = [f"cost_model._target_={OwnCosts.__module__}.OwnCosts", "+cost_model.ms=3"]
    planner = planner_factory(composed("plan", "sharder=dim", *words)).planner(RUN)
    assert planner.cost_model == OwnCosts(3)
    assert train_policy._cost_model(composed("train_policy", *words), RUN) == OwnCosts(3)
    with pytest.raises(ConfigError, match=r"^cost_model: .* argument 'dram'"):
        train_policy._cost_model(composed("train_policy", "+cost_model.dram=3"), RUN)


def test_kept_keys_can_refer_to_the_run(composed):
    cfg = composed("train", "sharder=dim", "seed=7", RANDOM, "sharder.seed=${seed}")
    node = drop_keys_of_replaced_class(cfg, "sharder")
    assert node.seed == 7
    assert callable(instantiate(node).shard)
    assert "weight" in cfg.sharder, "the run's config is left as it was"
