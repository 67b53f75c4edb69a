"""Every example of the guide's pages extending.md, planning.md and tour.md works as it stands."""

import dataclasses
import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from omegaconf import DictConfig
from torchrec.sparse.jagged_tensor import KeyedTensor

from dlrm_sharded import Planner, RunContext, ShardingPlan, ShardingTask, Table, validate
from dlrm_sharded.calibration.hardware_costs import needs_measuring
from dlrm_sharded.calibration.priors import learned_cost_model
from dlrm_sharded.calibration.sample_store import Conditions, SampleStore
from dlrm_sharded.calibration.samples import workload_of_sample
from dlrm_sharded.commands.asked_task import build_dataset
from dlrm_sharded.commands.sharders import planner_factory
from dlrm_sharded.files.json_files import write_json
from dlrm_sharded.hardware.hardware import Hardware
from dlrm_sharded.plans.plan import read_plan
from dlrm_sharded.plans.task import GIB
from dlrm_sharded.ranks.distributed import detect_topology
from dlrm_sharded.testing import check_cost_model, check_sharder, small_tasks
from tests.unit.cost.hardware import measured_plans

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "guide" / "extending.md"
TITLED_BLOCK = re.compile(r'^```(?:python|yaml) title="([^"]+)"\n(.*?)^```$', re.M | re.S)
PYTHON_BLOCK = re.compile(r"^```python\b.*?\n(.*?)^```$", re.M | re.S)
TASK = small_tasks()["w3-mixed"]
CPU = RunContext(device="cpu")


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A user's folder with all files of the page, from which their modules are imported."""
    folder = tmp_path_factory.mktemp("project")
    files = TITLED_BLOCK.findall(PAGE.read_text())
    for name, text in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    modules = [Path(name).stem for name, _ in files if name.endswith(".py")]
    sys.path.insert(0, str(folder))
    yield folder
    sys.path.remove(str(folder))
    for module in modules:
        sys.modules.pop(module, None)


def composed(project: Path, name: str, *overrides: str) -> DictConfig:
    """The config of a command that is started with `--config-dir my_conf`."""
    with initialize_config_dir(version_base="1.3", config_dir=str(ROOT / "conf")):
        return compose(name, [f"hydra.searchpath=[file://{project / 'my_conf'}]", *overrides])


def planner(project: Path, *overrides: str) -> Planner:
    return planner_factory(composed(project, "plan", "task=unused", *overrides)).planner(CPU)


def module(project: Path, name: str) -> ModuleType:
    assert (project / f"{name}.py").exists()
    return importlib.import_module(name)


def test_every_file_of_the_page_is_used() -> None:
    files = TITLED_BLOCK.findall(PAGE.read_text())

    assert sorted(name for name, _ in files) == [
        *("best_of.py", "fit_linear_model.py", "my_conf/cost_model/linear.yaml"),
        *("my_conf/data/films.yaml", "my_conf/model/concatenated.yaml"),
        *("my_conf/sharder/best_of.yaml", "my_conf/sharder/round_robin.yaml"),
        "my_conf/topology/my_cluster.yaml",
        *("my_cost_model.py", "my_dataset.py", "my_model.py", "my_sharder.py"),
        *("test_my_cost_model.py", "test_my_dataset.py", "test_my_sharder.py"),
    ]


@pytest.mark.parametrize("task", small_tasks().values(), ids=small_tasks())
def test_sharder(project: Path, task: ShardingTask) -> None:
    page = module(project, "test_my_sharder")

    page.test_round_robin(task)


def planned(project: Path, word: str) -> ShardingPlan:
    """The plan of the page's only command with a word."""
    write_json(project / "task.json", TASK.to_json())
    (command,) = re.findall(rf"^    dlrm-plan (.*{word}.*)$", PAGE.read_text(), re.M)
    script = [sys.executable, "-m", "dlrm_sharded.commands.plan"]

    subprocess.run([*script, *command.split()], cwd=project, check=True)

    return read_plan(project / "plan.json")


def test_sharder_without_a_yaml(project: Path) -> None:
    plan = planned(project, "RoundRobinSharder")

    largest = max(plan.shards, key=lambda shard: shard.bytes_on(TASK.topology))
    assert largest.rank == 1


def test_sharder_with_a_yaml(project: Path) -> None:
    made = planner(project, "sharder=round_robin")

    assert isinstance(made.sharder, module(project, "my_sharder").RoundRobinSharder)


def test_sharder_that_uses_the_cost_model(project: Path) -> None:
    made = planner(project, "sharder=best_of")

    plan = check_sharder(lambda: planner(project, "sharder=best_of").sharder, TASK)

    best_ms = made.cost_model.predict(plan, TASK).cost_ms
    for name in ("size", "lookup", "size_lookup"):
        other = planner(project, f"sharder={name}").sharder.shard(TASK)
        assert best_ms <= made.cost_model.predict(other, TASK).cost_ms
    elsewhere = RunContext("cpu", Hardware("cpu: x"))
    prior = learned_cost_model(elsewhere, warns=False)
    made = dataclasses.replace(made, cost_model=prior)
    assert made.uses_costs
    assert needs_measuring(made.cost_model, elsewhere, exchanges=False), "a first run measures"


def test_dataset(project: Path) -> None:
    page = module(project, "test_my_dataset")

    page.test_films()


def test_dataset_with_a_yaml(project: Path) -> None:
    dataset = build_dataset(composed(project, "train", "data=films", "batch_size=12"))

    assert dataset.batch_size == 12
    assert dataset.num_batches("train") == 50


@pytest.mark.parametrize("task", small_tasks().values(), ids=small_tasks())
def test_cost_model(project: Path, task: ShardingTask) -> None:
    page = module(project, "test_my_cost_model")

    page.test_linear(task)


def test_cost_model_with_a_yaml(project: Path) -> None:
    made = planner(project, "cost_model=linear", "sharder=search")

    plan, report = made.plan(TASK)

    validate(plan, TASK)
    assert 0 <= report.gap < 0.25


def test_cost_model_without_a_yaml(project: Path) -> None:
    validate(planned(project, "my_cost_model"), TASK)


def test_linear_cost_model_of_measurements(project: Path) -> None:
    store = SampleStore(project / "store.jsonl")
    for sample in measured_plans(60, 10, seed=0):
        assert store.append(Conditions("sgd", None), sample)

    model = module(project, "fit_linear_model").fitted(store.path)

    check_cost_model(model, TASK)
    samples = [s for s in store.read(None).values() if s.kind == "computation"]
    found = [
        model.cost_task(TASK).compute.vectors(workload_of_sample(s))[:, :2].sum() for s in samples
    ]
    measured = [sum(rank.computation_ms for rank in s.cost.per_rank) for s in samples]
    assert np.corrcoef(found, measured)[0, 1] > 0.6


def test_interaction(project: Path) -> None:
    tables = (Table("a", 10, 16, 1.0), Table("b", 10, 8, 1.0))
    make = instantiate(composed(project, "train", "model=concatenated").model)

    model = make(tables, 5, device=torch.device("cpu"))
    pooled = KeyedTensor.from_tensor_list(["a", "b"], [torch.rand(3, 16), torch.rand(3, 8)])
    vectors = model.vector_stack(model.dense_arch(torch.rand(3, 5)), pooled)
    features = model.inter_arch(vectors)

    assert features.shape == (3, 3 * 16)
    assert model.over_arch(features).shape == (3, 1)


def test_hardware(project: Path) -> None:
    settings = instantiate(composed(project, "train", "topology=my_cluster").topology)
    topology = detect_topology(settings)

    assert topology.memory_bytes == 40 * GIB
    assert topology.intra_host_bytes_per_s == 50e9
    assert topology.inter_host_bytes_per_s == 12.5e9


@pytest.mark.parametrize("page", ["planning", "tour"])
def test_planning_in_python(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    example, *continued = PYTHON_BLOCK.findall((ROOT / "docs" / "guide" / f"{page}.md").read_text())
    write_json(tmp_path / "task.json", TASK.to_json())
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}

    exec(example, names)

    assert names["report"].gap >= 0
    for block in continued:
        exec(block, names)
    assert ("own" in names) == (page == "tour")
