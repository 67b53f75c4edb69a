"""Versions that do not belong together are named in one line, with the command that fixes them."""

import tomllib
from typing import Any

import pytest

from dlrm_sharded.ranks import version_sets
from dlrm_sharded.ranks.version_sets import (
    DEFAULTS,
    FBGEMM,
    PACKAGES,
    SETS,
    Build,
    installed_versions,
    minor,
    missing_text,
    version_problem,
)
from tests.preloaded import ROOT

REQUIREMENTS = ROOT / "requirements"

CPU_COMMAND = 'pip install "dlrm_sharded[cpu]" && pip install --no-deps torchrec==1.8.0'
CUDA_COMMAND = 'pip install "dlrm_sharded[cuda]"'
PROBLEMS: dict[str, tuple[tuple[str | None, ...], str]] = {
    "unknown_torch": (("2.15.0", None, "1.9.0", "1.9.2"), f"fbgemm-gpu && {CUDA_COMMAND}"),
    "newer_fbgemm": (("2.13.0", None, "1.9.0", "1.9.2"), f"fbgemm-gpu && {CUDA_COMMAND}"),
    "newer_torchrec_on_cpu": (
        ("2.13.0+cpu", "1.8.0", None, "1.9.2"),
        f"fbgemm-gpu-cpu && {CPU_COMMAND}",
    ),
    "both_builds": (
        ("2.13.0+cpu", "1.8.0", "1.9.0", "1.8.0"),
        f"fbgemm-gpu-cpu fbgemm-gpu && {CPU_COMMAND}",
    ),
    "cuda_beside_torch_for_cpu": (
        ("2.13.0+cpu", None, "1.8.0", "1.8.0"),
        f"fbgemm-gpu && {CPU_COMMAND}",
    ),
}


@pytest.fixture(autouse=True)
def any_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DLRM_SHARDED_DEVICE", raising=False)


def packages(*versions: str | None) -> dict[str, str]:
    return {name: text for name, text in zip(PACKAGES, versions, strict=True) if text}


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.mark.parametrize("name", PROBLEMS)
def test_versions_that_do_not_belong_together(name):
    versions, command = PROBLEMS[name]
    installed = packages(*versions)
    problem = version_problem(installed)
    assert problem is not None
    listed = ", ".join(f"{package} {text}" for package, text in installed.items())
    assert problem.startswith(f"{listed} do not belong together: ")
    assert "(known are 2.14, 2.13, 2.11)" in problem
    assert problem.endswith(f"; run: pip uninstall -y {command}")


@pytest.mark.parametrize(
    "versions",
    [
        *[(torch, None, *others) for torch, others in SETS.items()],
        *[(f"{torch}+cpu", f, None, torchrec) for torch, (f, torchrec) in SETS.items()],
        ("2.14.0+cu130", None, "1.9.0+cu130", "1.9.0"),
        ("2.15.0", None, None, None),
        (None, None, None, None),
    ],
    ids=lambda versions: "-".join(text or "none" for text in versions),
)
def test_nothing_is_said_of_other_versions(versions):
    """Of sets, patch levels and builds of them, sets unknown here, and torch alone."""
    assert version_problem(packages(*versions)) is None


def test_the_stand_in_is_no_build_of_fbgemm(monkeypatch):
    found = {"torch": "2.13.0+cpu", "fbgemm-gpu-cpu": "1.8.0", "fbgemm-gpu": "0+cpu"}
    monkeypatch.setattr(version_sets, "readable_versions", lambda _: found)
    assert version_problem(installed_versions()) is None


def pins_of(build: Build, torch: str) -> set[str]:
    fbgemm, torchrec = SETS[torch]
    return {f"torch=={torch}", f"{FBGEMM[build]}=={fbgemm}", f"torchrec=={torchrec}"}


@pytest.mark.parametrize(
    ("name", "build", "torch"),
    [
        ("cpu", "cpu", DEFAULTS["cpu"]),
        ("cuda", "cuda", DEFAULTS["cuda"]),
        ("cuda-2.11", "cuda", "2.11.0"),
    ],
)
def test_requirements_are_the_sets(name, build, torch):
    lines = (REQUIREMENTS / f"{name}.txt").read_text().splitlines()
    pins = {line for line in lines if "==" in line and not line.startswith("#")}
    assert pins == pins_of(build, torch)
    assert ("./requirements/fbgemm-gpu-shim" in lines) == (build == "cpu")
    assert len([*REQUIREMENTS.glob("*.txt")]) == 3


@pytest.mark.parametrize("build", FBGEMM)
def test_extras_are_the_defaults(build):
    torch = DEFAULTS[build]
    kept = {p for p in pins_of(build, torch) if p.startswith("fbgemm")}
    kept |= {f"torch=={minor(torch)}.*", "dlrm_sharded[training]"}
    if build == "cuda":
        kept.add(f"torchrec=={SETS[torch][1]}")
    extras = project()["optional-dependencies"]
    assert {*extras[build]} == kept
    assert {name for name in extras if name.startswith(("cpu", "cuda"))} == {*FBGEMM}


def test_only_a_package_that_is_missing_is_called_missing():
    """FBGEMM misses parts of itself, which matters to those who let warnings be errors."""
    part = ModuleNotFoundError("No module named 'fbgemm_gpu.a.part'", name="fbgemm_gpu.a.part")
    assert missing_text(part) is None
    text = missing_text(ModuleNotFoundError("No module named 'fbgemm_gpu'", name="fbgemm_gpu"))
    assert text is not None
    assert text.startswith("this needs fbgemm_gpu, which is not installed; run: ")
