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


def test_is_discovered():
    assert TorchXLauncher.__name__ in {
        found.__name__ for found in Plugins.instance().discover(Launcher)
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher_name", "overrides"),
    [("torchx", ["hydra.launcher.j=1x2", "hydra.launcher.max_parallel=2"])],
)
class TestLauncher(LauncherTestSuite):
    pass


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher_name", "overrides"),
    [("torchx", ["hydra.launcher.j=1x1", "hydra/sweeper=basic", "hydra.sweeper.max_batch_size=2"])],
)
class TestBatchedSweeper(BatchedSweeperTestSuite):
    pass


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task_launcher_cfg", "extra_flags"),
    [({}, ["-m", "hydra/launcher=torchx", "hydra.launcher.j=1x1"])],
)
class TestIntegration(IntegrationTestSuite):
    pass
