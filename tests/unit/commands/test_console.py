"""Without torch, commands plan and report; the others say in one line what to install."""

import os
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

from dlrm_sharded.files.json_files import write_json
from dlrm_sharded.testing import small_tasks
from tests.preloaded import ROOT

WITHOUT_TORCH = """
import sys
from dlrm_sharded.commands import console
from dlrm_sharded.ranks.version_sets import TRAINING_MODULES

class Missing:
    def find_spec(self, name, *_):
        if name.partition(".")[0] in TRAINING_MODULES:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
sys.exit(getattr(console, sys.argv.pop(1))())
"""


def run(
    folder: Path, *arguments: str, program: str = WITHOUT_TORCH
) -> subprocess.CompletedProcess[str]:
    (folder / "without_torch.py").write_text(program)
    return subprocess.run(
        [sys.executable, "without_torch.py", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "launch")])},
        capture_output=True,
        text=True,
        check=False,
    )


def write_task(folder: Path) -> str:
    write_json(folder / "task.json", small_tasks()["w3-mixed"].to_json())
    return "task=task.json"


@pytest.mark.parametrize("sharder", ["search", "size_lookup"])
def test_plans_without_torch(sharder, tmp_path):
    done = run(tmp_path, "plan", write_task(tmp_path), f"sharder={sharder}", "out=plan.json")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "plan.json").exists()


def test_compares_without_torch(tmp_path):
    words = [write_task(tmp_path).replace("task=", "tasks="), "sharders=[search,dim]"]
    done = run(tmp_path, "compare", *words, "out=out")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "summary.md").exists()


@pytest.mark.parametrize("override", ["sharder=dmi", "trainer.num_stepz=3"])
def test_ranks_are_not_started_with_wrong_overrides(override, tmp_path):
    done = run(tmp_path, "torchrun", "-m", "dlrm_sharded.train", override)
    assert done.returncode == 2
    assert "error: " in done.stderr
    assert "known" in done.stderr
    assert "not in struct" not in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["plan", "sharder=autoshard", "out=plan.json"],
        ["plan", "sharder=torchrec", "out=plan.json"],
        ["plan", "hardware=here", "out=plan.json"],
        ["train"],
        ["torchrun", "-m", "dlrm_sharded.train", "sharder=dim"],
    ],
    ids="-".join,
)
def test_says_what_to_install(arguments, tmp_path):
    if arguments[0] == "plan":
        arguments = [*arguments, write_task(tmp_path)]
    done = run(tmp_path, *arguments)
    assert done.returncode == 2, done.stderr
    [line] = [line for line in (done.stdout + done.stderr).splitlines() if "error: " in line]
    assert "error: this needs torch" in line
    assert "which is not installed; run: pip " in line
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "plan.json").exists()


def test_every_command_is_a_module():
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    for command, target in scripts.items():
        module, name = target.split(":")
        assert name == command.removeprefix("dlrm-").replace("-", "_")
        function = getattr(import_module(module), name)
        assert callable(import_module(f"dlrm_sharded.{function.args[0]}").main)


def test_an_interrupt_while_modules_load_is_one_line(tmp_path):
    """They take seconds, and a traceback would be one of torch."""
    error = 'ModuleNotFoundError(f"No module named {name!r}", name=name)'
    program = WITHOUT_TORCH.replace(error, "KeyboardInterrupt")
    done = run(tmp_path, "calibrate", program=program)
    assert (done.returncode, done.stderr) == (130, "stopped by the user\n")
