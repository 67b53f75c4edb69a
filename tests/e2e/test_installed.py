"""The wheel runs without the repository: every command, from an empty folder with a space."""

import json
import os
import shutil
import site
import subprocess
import sys
import sysconfig
import tarfile
from importlib.metadata import Distribution
from pathlib import Path

import pytest

from dlrm_sharded.files.json_files import write_json
from dlrm_sharded.testing import small_tasks
from tests.e2e.runs import ROOT, result_of
from tests.unit.calibration.costs_of_02 import write_costs
from tests.unit.cost.hardware import MANIFEST, measured_plans

pytestmark = pytest.mark.slow

SOURCES = (
    *("dlrm_sharded", "conf", "launch", "pyproject.toml", "README.md"),
    *("LICENSE", "NOTICE", "CITATION.cff"),
)
SMALL_RUN = ["batch_size=64", "trainer.num_steps=2", "data.max_rows=500", "data.num_val_batches=1"]
COLLECTION = [*("num_ranks=2", "minutes=0.02", "batch_sizes=[64]", "journal=samples")]


class Installation:
    """An environment with the wheel, and an empty folder in which its commands run."""

    def __init__(self, wheel: Path, folder: Path) -> None:
        self.folder = folder / "an empty folder"
        self.folder.mkdir()
        environment = folder / "an environment"
        run([sys.executable, "-m", "venv", "--without-pip", str(environment)], folder)
        self.bin = environment / "bin"
        scheme = {"base": str(environment), "platbase": str(environment)}
        self.packages = Path(sysconfig.get_path("purelib", vars=scheme))
        # Other packages come from this environment. Python does not read the .pth files there, so
        # the checkout, if it is installed in editable mode, stays out of reach.
        (self.packages / "dependencies.pth").write_text("\n".join(site.getsitepackages()))
        pip = [sys.executable, "-m", "pip", "--python", str(self.bin / "python"), "install"]
        run([*pip, "--quiet", "--no-deps", "--no-index", str(wheel)], folder)

    def run(self, command: str, *arguments: str, exit_code: int = 0) -> str:
        """Run one of the environment's commands and return its output."""
        return run([str(self.bin / command), *arguments], self.folder, exit_code)


def run(command: list[str], folder: Path, exit_code: int = 0) -> str:
    outside = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        command,
        cwd=folder,
        env=outside | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == exit_code, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def installation(tmp_path_factory: pytest.TempPathFactory) -> Installation:
    folder = tmp_path_factory.mktemp("installed")
    for name in SOURCES:  # a copy, so that the build leaves nothing in the checkout
        source, copy = ROOT / name, folder / "sources" / name
        copy.parent.mkdir(exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, copy, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, copy)
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    run([*pip, "--wheel-dir", "wheels", "./sources"], folder)
    sdist = [sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d"]
    run([*sdist, str(folder / "sdists")], folder / "sources")
    (wheel,) = (folder / "wheels").glob("*.whl")
    return Installation(wheel, folder)


def test_license(installation):
    """The wheel and the sdist have the license, and the notices of the data they contain."""
    [licenses] = installation.packages.glob("dlrm_sharded-*.dist-info/licenses")
    [sdist] = (installation.folder.parent / "sdists").glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    for name in ("LICENSE", "NOTICE"):
        assert (licenses / name).read_text() == (ROOT / name).read_text()
        assert name in packed
    assert "CITATION.cff" in packed
    about = Distribution.at(licenses.parent).metadata
    assert about["License-Expression"] == "Apache-2.0"
    for data in (installation.packages / "dlrm_sharded/hardware/gpus").glob("*.[cj]s*"):
        assert f"dlrm_sharded/hardware/gpus/{data.name}" in (ROOT / "NOTICE").read_text()


def test_is_not_the_checkout(installation):
    code = "import dlrm_sharded, dlrm_torchx; print(dlrm_sharded.__file__, dlrm_torchx.__file__)"
    found = installation.run("python", "-c", code)
    assert found.count(str(installation.packages)) == 2


def test_plans(installation):
    write_json(installation.folder / "task.json", small_tasks()["w3-mixed"].to_json())
    installation.run("dlrm-plan", "task=task.json", "sharder=size_lookup", "out=plan.json")
    assert json.loads((installation.folder / "plan.json").read_text())["predicted"]["max_ms"] > 0


def test_trains_under_torchrun(installation):
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    overrides = [*SMALL_RUN, "sharder=dim", "hydra.run.dir=runs/torchrun"]
    installation.run("python", *torchrun, "-m", "dlrm_sharded.train", *overrides)
    result = result_of(installation.folder / "runs/torchrun")
    assert result["world_size"] == 2
    assert result["commit"] is None


def test_trains_under_torchx(installation):
    """The component has a name of its own, and TorchX's components keep theirs."""
    torchx = ["-m", "torchx.cli.main"]
    overrides = [*SMALL_RUN, "sharder=dim", "hydra.run.dir=runs/torchx"]
    run_one = ["run", "-s", "local_cwd", "dlrm.train", "-j", "1x1", *overrides]
    installation.run("python", *torchx, *run_one)
    assert result_of(installation.folder / "runs/torchx")["world_size"] == 1
    known = installation.run("python", *torchx, "builtins").split()
    assert {"dlrm.train", "dist.ddp"} <= {*known}


def test_sweeps_and_reports(installation):
    overrides = [*SMALL_RUN, "sharder=random,dim", "hydra.launcher.j=1x1", "hydra.sweep.dir=sweep"]
    assert "#1 sharder=dim: succeeded" in installation.run("dlrm-train", "-m", *overrides)
    installation.run("dlrm-report", "sweep", "out=a comparison")
    assert "size" not in (installation.folder / "a comparison/summary.md").read_text().split()
    assert (installation.folder / "a comparison/summary.csv").read_text().count("\n") == 3


def test_calibrates(installation):
    """Both steps run; too few plans end the second one, which then fits costs of 0.2."""
    output = installation.run("dlrm-calibrate", *COLLECTION, "architecture=neuroshard", exit_code=2)
    assert "a fit needs 100;" in output
    write_costs(
        installation.folder / "synthetic.parquet", measured_plans(120, 60, seed=0), MANIFEST
    )
    installation.run("dlrm-calibrate", "costs=synthetic.parquet")
    assert list((installation.folder / "calibration").glob("prices-*"))


def test_trains_a_policy(installation):
    installation.run(
        "dlrm-train-policy",
        *("policy=dreamshard", "costs=predicted", "num_validation_tasks=1", "out=policies"),
        *("schedule.num_rounds=1", "schedule.plans_per_round=1", "tasks.num_tables=6"),
        *("policy.cost_updates=1", "policy.policy_updates=1", "policy.tasks_per_update=1"),
    )
    assert list((installation.folder / "policies").glob("dreamshard-*"))
