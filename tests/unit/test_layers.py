"""Imports point down only, and a library stays where it is needed."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
GROUND = [
    "dlrm_sharded.errors",
    "dlrm_sharded.json_files",
    "dlrm_sharded.context",
    "dlrm_sharded.tables",
    "dlrm_sharded.task",
    "dlrm_sharded.plan_cost",
    "dlrm_sharded.plan",
    "dlrm_sharded.plan_report",
]
"""Each may import those before it."""

LAYERS = {
    **dict.fromkeys(GROUND, 0),
    "dlrm_sharded.process": 0,
    "dlrm_sharded.zipf": 0,
    "dlrm_sharded.profiles": 0,
    "dlrm_sharded.provenance": 0,
    "dlrm_sharded.artifact": 0,
    "dlrm_sharded.sharders.base": 1,
    "dlrm_sharded.rl.base": 1,
    "dlrm_sharded.cost.base": 1,
    "dlrm_sharded.datasets.base": 1,
    "dlrm_sharded.sharders": 2,
    "dlrm_sharded.rl": 2,
    "dlrm_sharded.cost": 2,
    "dlrm_sharded.datasets": 2,
    "dlrm_sharded.search": 2,
    "dlrm_sharded.explain": 2,
    "dlrm_sharded.planning": 2,
    "dlrm_sharded.model": 2,
    "dlrm_sharded.torchrec_adapter": 2,
    "dlrm_sharded.fused_optimizers": 2,
    "dlrm_sharded.distributed": 2,
    "dlrm_sharded.testing": 2,
    "dlrm_sharded.calibration": 2,
    "dlrm_sharded.training": 3,
    "dlrm_sharded.runs": 3,
    "dlrm_sharded.commands": 4,
    "dlrm_sharded.train": 4,
    "dlrm_sharded": 5,  # what the package exports, to those outside
    "dlrm_torchx": 5,
    "hydra_plugins": 5,
    "component": 5,
    "scripts": 5,
}

PLANNING = ["dlrm_sharded.torchrec_adapter", "dlrm_sharded.sharders.torchrec"]
COMMANDS = [
    *("dlrm_sharded.train", "dlrm_sharded.commands.job", "dlrm_sharded.commands.cli"),
    *("dlrm_torchx", "hydra_plugins", "scripts"),
]
HOMES = {
    "hydra": COMMANDS,
    "omegaconf": COMMANDS,
    "torchx": ["dlrm_torchx", "component"],
    "fbgemm_gpu": ["dlrm_sharded.calibration.measure"],
    "safetensors": ["dlrm_sharded.artifact"],
    "torchrec.distributed": [
        *PLANNING,
        "dlrm_sharded.model",
        "dlrm_sharded.calibration.measure",
        "dlrm_sharded.calibration.collect",
        "dlrm_sharded.calibration.rank_bench",
        "dlrm_sharded.training",
    ],
    **{
        f"torchrec.distributed.{part}": PLANNING
        for part in (
            "planner",
            "sharding_plan",
            "embedding_types",
            "types.ParameterSharding",
            "types.ShardingType",
        )
    },
}
"""Library: the only modules that import it."""

FORBIDDEN = [
    ("dlrm_sharded.sharders", "dlrm_sharded.calibration.measure"),
    ("dlrm_sharded.sharders", "dlrm_sharded.training"),
    ("dlrm_sharded.sharders", "dlrm_sharded.train"),
    ("dlrm_sharded.training", "dlrm_sharded.train"),
    ("dlrm_sharded.rl", "dlrm_sharded.sharders"),
    ("dlrm_sharded.rl", "dlrm_sharded.calibration.measure"),
    ("dlrm_sharded.rl", "dlrm_sharded.calibration.collect"),
    ("dlrm_sharded.rl", "dlrm_sharded.calibration.rank_bench"),
    ("dlrm_sharded.cost", "dlrm_sharded.sharders"),
    ("dlrm_sharded.cost", "dlrm_sharded.rl"),
    ("dlrm_sharded.cost", "dlrm_sharded.search"),
    ("dlrm_sharded.search", "dlrm_sharded.sharders"),
    ("dlrm_sharded", "scripts"),
    ("dlrm_sharded", "dlrm_torchx"),
    ("dlrm_sharded", "hydra_plugins"),
    ("dlrm_sharded", "tests"),
]
"""Beyond the layers: the first never imports the second."""

PROTOCOLS = [name for name, layer in LAYERS.items() if layer == 1]


def within(name: str, package: str) -> bool:
    """Whether a dotted name is a package or something in it."""
    return name == package or name.startswith(f"{package}.")


def imports() -> Iterator[tuple[str, str]]:
    """(module, what it imports) of all our code: inside functions and for type checks too."""
    for folder in ("dlrm_sharded", "scripts", "launch"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            above = ROOT / "launch" if folder == "launch" else ROOT
            parts = path.relative_to(above).with_suffix("").parts
            module = ".".join(parts).removesuffix(".__init__")
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Import):
                    yield from ((module, alias.name) for alias in node.names)
                elif isinstance(node, ast.ImportFrom):
                    assert node.level == 0, f"{module} has a relative import"
                    yield from ((module, f"{node.module}.{alias.name}") for alias in node.names)


IMPORTS = sorted(set(imports()))


def layer(name: str) -> int:
    return LAYERS[max((known for known in LAYERS if within(name, known)), key=len)]


def test_finds_the_imports() -> None:
    assert ("dlrm_sharded.task", "dlrm_sharded.tables.Table") in IMPORTS
    assert ("dlrm_sharded", "dlrm_sharded.torchrec_adapter.ShardedPlanner") in IMPORTS
    assert {module for module, _ in IMPORTS if within(module, "scripts")}


def room(name: str) -> str:
    return ".".join(name.split(".")[:2])


def test_imports_point_down() -> None:
    """Or go to the module's own room."""
    ours = [(a, b) for a, b in IMPORTS if within(b, "dlrm_sharded") or within(b, "scripts")]
    up = [(a, b) for a, b in ours if layer(b) > layer(a) and room(a) != room(b)]
    assert [f"{a} -> {b}" for a, b in up] == []


@pytest.mark.parametrize("module", GROUND)
def test_the_ground_floor_needs_no_library(module: str) -> None:
    below = GROUND[: GROUND.index(module)]
    allowed = [*sys.stdlib_module_names, "numpy", *below]
    found = [b for a, b in IMPORTS if a == module and not any(within(b, name) for name in allowed)]
    assert found == []


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_protocols_know_values_and_protocols_only(protocol: str) -> None:
    """And their own room, in whose terms they speak."""
    ours = [b for a, b in IMPORTS if a == protocol and within(b, "dlrm_sharded")]
    assert [b for b in ours if layer(b) > 1 and room(b) != room(protocol)] == []


@pytest.mark.parametrize("library", HOMES)
def test_libraries_stay_at_home(library: str) -> None:
    users = {module for module, imported in IMPORTS if within(imported, library)}
    assert users, f"nothing imports {library}: drop the rule"
    strays = {user for user in users if not any(within(user, home) for home in HOMES[library])}
    assert strays == set()


@pytest.mark.parametrize(("package", "other"), FORBIDDEN, ids=lambda name: name.split(".")[-1])
def test_never_imports(package: str, other: str) -> None:
    found = [f"{a} -> {b}" for a, b in IMPORTS if within(a, package) and within(b, other)]
    assert found == []


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("dlrm_sharded", ["torch", "torchrec", "fbgemm_gpu", "hydra", "omegaconf"]),
        ("dlrm_sharded.sharders.heuristics", ["torch"]),
        ("dlrm_sharded.sharders.plan_file", ["torch"]),
        ("dlrm_sharded.sharders.neuroshard", ["torch", "torchrec", "fbgemm_gpu"]),
        ("dlrm_sharded.sharders.neuroshard_paper", ["torch"]),
        ("dlrm_sharded.datasets.task_sets", ["torch"]),
        ("dlrm_sharded.train", ["torch", "torchx", "matplotlib"]),
        ("dlrm_sharded.runs", ["torch", "hydra", "omegaconf", "matplotlib", "tensorboard"]),
        ("dlrm_sharded.runs.comparison_events", ["torch"]),
        ("dlrm_sharded.runs.run_events", ["torch", "matplotlib"]),
        ("dlrm_sharded.explain.text", ["torch", "matplotlib"]),
        ("dlrm_torchx.worker", ["torch", "torchx"]),
        ("hydra_plugins.dlrm_torchx_launcher", ["torch", "torchx", "dlrm_torchx"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_loads_light(module: str, heavy: list[str]) -> None:
    code = f"import sys, {module}; print(*sys.modules)"
    python = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    loaded = python.stdout.split()
    assert module in loaded
    assert not set(heavy) & set(loaded)


def test_listing_hydras_plugins_loads_light() -> None:
    """What every command of every Hydra application in this environment pays."""
    code = (
        "import sys; from hydra.core.plugins import Plugins; from hydra.plugins.launcher import "
        "Launcher; print(Plugins.instance().discover(Launcher)); print(*sys.modules)"
    )
    python = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    launchers, loaded = python.stdout.splitlines()
    assert "TorchXLauncher" in launchers
    assert not {"torch", "torchx", "dlrm_torchx", "polars"} & set(loaded.split())
