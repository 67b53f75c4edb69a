"""Configs as commands compose them."""

from collections.abc import Callable
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from dlrm_sharded.commands.yamls import CONF_DIR

Compose = Callable[..., DictConfig]


def composed_config(config: str, *overrides: str, **options: bool) -> DictConfig:
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF_DIR)):
        return compose(config, [*overrides], **options)


@pytest.fixture
def composed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Compose:
    """Composes configs as a command does, in an empty folder."""

    def make(config: str, *overrides: str) -> DictConfig:
        cfg = composed_config(config, *overrides, return_hydra_config=True)
        monkeypatch.setattr(HydraConfig.instance(), "cfg", None)
        HydraConfig.instance().set_config(cfg)
        return cfg

    monkeypatch.chdir(tmp_path)
    return make
