"""Wheels that are packed on one machine are installed on another without a package index."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import wheels
from tests.conftest import ROOT

NAME = "made_up_for_wheels"


@pytest.mark.parametrize(
    ("newest", "found"),
    [
        (
            "manylinux_2_12_x86_64",
            [
                *(f"manylinux_2_{minor}_x86_64" for minor in range(12, 4, -1)),
                *("manylinux2010_x86_64", "manylinux1_x86_64"),
            ],
        ),
        ("linux_aarch64", ["linux_aarch64"]),
    ],
)
def test_wheels_of_older_platforms_run_too(newest, found):
    assert wheels.platforms(newest) == found


@pytest.mark.parametrize(
    "path", sorted((ROOT / "requirements").glob("*.txt")), ids=lambda p: p.stem
)
def test_every_requirement_is_a_package_or_a_folder(path):
    packages, ours = wheels.read_requirements(path)
    assert all("==" in package for package in packages)
    assert all((folder / "pyproject.toml").exists() for folder, _ in ours)
    assert ours[-1][1] == "[test]"


def make_wheel(folder: Path) -> Path:
    """Write a wheel whose command stands for the check of an installation."""
    folder.mkdir(parents=True)
    info = f"{NAME}-1.0.dist-info"
    path = folder / f"{NAME}-1.0-py3-none-any.whl"
    files = {
        f"{NAME}.py": "def main():\n    print('made up is installed')\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {NAME}\nVersion: 1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": f"[console_scripts]\ndlrm-check-install = {NAME}:main\n",
    }
    record = "".join(f"{name},,\n" for name in [*files, f"{info}/RECORD"])
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in (files | {f"{info}/RECORD": record}).items():
            archive.writestr(name, content)
    return path


def fill(folder: Path, monkeypatch: pytest.MonkeyPatch, *, part_gb: float) -> None:
    """Fill a folder as with network, where pip finds one wheel."""

    def pip(*words: object, python: object = None) -> None:
        if words[0] == "download":
            make_wheel(folder / "found").rename(folder / "wheels" / f"{NAME}-1.0-py3-none-any.whl")
            (folder / "found").rmdir()

    requirements = folder.parent / "requirements.txt"
    requirements.write_text(f"{NAME}==1.0\n")
    with monkeypatch.context() as patch:
        patch.setattr(wheels, "pip", pip)
        wheels.fill(folder, requirements, "3.11", "linux_x86_64", part_gb)


def install(folder: Path, environment: Path) -> "subprocess.CompletedProcess[str]":
    """Install as without network, from a folder that was copied."""
    return subprocess.run(
        [sys.executable, "wheels.py", "install", "--venv", str(environment)],
        cwd=folder,
        env=os.environ | {"PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("part_gb", [0, 4e-7], ids=["whole", "parts of 400 B"])
def test_what_is_filled_is_installed(part_gb, tmp_path, monkeypatch):
    fill(tmp_path / "filled", monkeypatch, part_gb=part_gb)
    parts = [path.stat().st_size for path in (tmp_path / "filled").glob("wheels.tar.*")]
    assert len(parts) > 2 if part_gb else parts == []
    assert max(parts, default=0) <= 400
    shutil.copytree(tmp_path / "filled", tmp_path / "copied")
    done = install(tmp_path / "copied", tmp_path / "environment")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "made up is installed\n"


def test_a_copy_that_is_not_whole_is_refused(tmp_path, monkeypatch):
    folder = tmp_path / "filled"
    fill(folder, monkeypatch, part_gb=4e-7)
    (folder / "wheels.tar.001").unlink()
    done = install(folder, tmp_path / "environment")
    assert done.returncode == 1
    assert "wheels.tar.001: FAILED open or read" in done.stdout
    assert done.stderr.splitlines()[-1].startswith("error: Command '['sha256sum'")
    assert not (tmp_path / "environment").exists()
