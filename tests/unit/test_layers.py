"""What import-linter does not check: what is loaded at run time, and parts of TorchRec.

The layers and the homes of other libraries are contracts in pyproject.toml (`make lint`).
"""

import ast
import functools
import subprocess
import sys
from pathlib import Path

import pytest

from dlrm_sharded.commands import console
from dlrm_sharded.files.json_files import write_json
from dlrm_sharded.testing import small_tasks

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = {name for name, value in vars(console).items() if isinstance(value, functools.partial)}
PLANNING_PARTS = ("planner", "sharding_plan", "embedding_types")
PLANNING_TYPES = {"ParameterSharding", "ShardingType"}
TRANSLATORS = {
    "drop_in/model_plan.py",
    "drop_in/module_tables.py",
    "drop_in/parameter_constraints.py",
    "drop_in/sharded_planner.py",
    "model/torchrec_adapter.py",
    "sharders/torchrec.py",
    "sharders/torchrec_search.py",
}


def knows_torchrecs_plans(path: Path) -> bool:
    """Whether a module imports what only translators of plans need, in functions too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torchrec."):
            parts = str(node.module).split(".")[2:]
            if {*parts} & {*PLANNING_PARTS} or {a.name for a in node.names} & PLANNING_TYPES:
                return True
    return False


def test_only_translators_know_torchrecs_plans() -> None:
    package = ROOT / "dlrm_sharded"
    users = {path for path in package.rglob("*.py") if knows_torchrecs_plans(path)}
    assert {str(path.relative_to(package)) for path in users} == TRANSLATORS


def printed(code: str, *arguments: str, cwd: Path = ROOT) -> str:
    """What a Python prints that runs the code."""
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=True).stdout


def test_values_need_no_other_library() -> None:
    """What `import dlrm_sharded` loads is of this package and of Python, and perhaps NumPy."""
    code = (
        "import sys; before = {*sys.modules}; import dlrm_sharded; print(*{*sys.modules} - before)"
    )
    loaded = {name.split(".")[0] for name in printed(code).split()}
    assert loaded - sys.stdlib_module_names - {"numpy"} == {"dlrm_sharded"}


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("dlrm_sharded", ["torch", "torchrec", "fbgemm_gpu", "hydra", "omegaconf"]),
        ("dlrm_sharded.sharders.heuristics", ["torch"]),
        ("dlrm_sharded.sharders.plan_file", ["torch"]),
        ("dlrm_sharded.sharders.search", ["torch", "torchrec", "fbgemm_gpu"]),
        ("dlrm_sharded.sharders.neuroshard", ["torch"]),
        ("dlrm_sharded.datasets.task_sets", ["torch"]),
        ("dlrm_sharded.train", ["torch", "torchx", "matplotlib"]),
        ("dlrm_sharded.runs", ["torch", "hydra", "omegaconf", "matplotlib", "tensorboard"]),
        ("dlrm_sharded.runs.comparison_figures", ["torch"]),
        ("dlrm_sharded.runs.run_events", ["torch", "matplotlib"]),
        ("dlrm_sharded.explain.text", ["torch", "matplotlib"]),
        ("dlrm_torchx.worker", ["torch", "torchx"]),
        ("hydra_plugins.dlrm_torchx_launcher", ["torch", "torchx", "dlrm_sharded"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_loads_light(module: str, heavy: list[str]) -> None:
    loaded = printed(f"import sys, {module}; print(*sys.modules)").split()
    assert module in loaded
    assert not set(heavy) & set(loaded)


@pytest.mark.parametrize("sharder", ["dim", "search"])
def test_planning_loads_no_torch(tmp_path: Path, sharder: str) -> None:
    """A whole `dlrm-plan` of a task.json, with a cost model, the lower bound and the diagnosis."""
    write_json(tmp_path / "task.json", small_tasks()["w3-mixed"].to_json())
    code = (
        "import atexit, sys; from dlrm_sharded.commands.console import plan; "
        "atexit.register(lambda: print(*sys.modules)); plan()"
    )
    overrides = ["task=task.json", f"sharder={sharder}", "explain=true", "out=plan.json"]
    loaded = printed(code, *overrides, cwd=tmp_path).split()
    assert (tmp_path / "plan.json").exists()
    assert "dlrm_sharded.explain.diagnosis" in loaded
    assert not {"torch", "torchrec", "fbgemm_gpu", "polars", "matplotlib"} & {*loaded}


@pytest.mark.parametrize(
    "command", sorted(COMMANDS - {"calibrate", "evaluate", "torchrun", "train_policy"})
)
def test_help_loads_light(command: str) -> None:
    """But for commands that compute on ranks, and torchrun, whose arguments are torch's."""
    code = (
        "import atexit, sys; from dlrm_sharded.commands import console; "
        "atexit.register(lambda: print(*sys.modules)); "
        f"sys.argv = ['{command}', '--help']; sys.exit(console.{command}())"
    )
    *said, loaded = printed(code).splitlines()
    assert said
    assert not {"torch", "polars", "scipy", "matplotlib"} & {*loaded.split()}


def test_listing_hydras_plugins_loads_light() -> None:
    """What every command of every Hydra application in this environment pays."""
    code = (
        "import sys; from hydra.core.plugins import Plugins; from hydra.plugins.launcher import "
        "Launcher; print(Plugins.instance().discover(Launcher)); print(*sys.modules)"
    )
    launchers, loaded = printed(code).splitlines()
    assert "TorchXLauncher" in launchers
    assert not {"torch", "torchx", "dlrm_sharded", "polars"} & set(loaded.split())
