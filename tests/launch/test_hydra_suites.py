"""Hydra's own tests of launchers, with jobs of one rank and of two."""

import sys

import pytest
from hydra.core.plugins import Plugins
from hydra.plugins.launcher import Launcher
from hydra.test_utils.launcher_common_tests import (
    BatchedSweeperTestSuite,
    IntegrationTestSuite,
    LauncherTestSuite,
)
from hydra.version import Version, VersionBase

from hydra_plugins.dlrm_torchx_launcher import TorchXLauncher
from tests import preloaded


@pytest.fixture(autouse=True)
def hydras_own_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    """Importing our command sets a version_base for the process; Hydra's tests expect 1.1."""
    monkeypatch.setattr(VersionBase.instance(), "version_base", Version("1.1"))


@pytest.fixture(autouse=True)
def preloaded_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", preloaded.python())
    monkeypatch.setenv("PYTHON_EXEC", preloaded.python())


SHAPES = ["1x1", "1x2"]


def overrides_for(shape: str) -> list[str]:
    return [f"hydra.launcher.j={shape}", "hydra.launcher.max_parallel=2"]


def test_is_discovered() -> None:
    assert TorchXLauncher.__name__ in {
        found.__name__ for found in Plugins.instance().discover(Launcher)
    }


@pytest.mark.parametrize(
    ("launcher_name", "overrides"),
    [("torchx", overrides_for(shape)) for shape in SHAPES],
    ids=SHAPES,
)
class TestLauncher(LauncherTestSuite):
    pass


@pytest.mark.parametrize(
    ("launcher_name", "overrides"),
    [
        ("torchx", [*overrides_for(shape), "hydra/sweeper=basic", "hydra.sweeper.max_batch_size=2"])
        for shape in SHAPES
    ],
    ids=SHAPES,
)
class TestBatchedSweeper(BatchedSweeperTestSuite):
    pass


@pytest.mark.parametrize(
    ("task_launcher_cfg", "extra_flags"),
    [({}, ["-m", "hydra/launcher=torchx", *overrides_for(shape)]) for shape in SHAPES],
    ids=SHAPES,
)
class TestIntegration(IntegrationTestSuite):
    pass
