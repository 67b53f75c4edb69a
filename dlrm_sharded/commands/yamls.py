"""The yaml files of configs: their folder, and the options of each group."""

from __future__ import annotations

from pathlib import Path

from omegaconf import DictConfig, OmegaConf

PACKAGE = Path(__file__).resolve().parents[1]
CONF_DIR = PACKAGE / "conf" if (PACKAGE / "conf").is_dir() else PACKAGE.parent / "conf"
"""Folder of the yaml files: inside an installed package, or beside the package in a checkout."""


def options_of(group: str) -> list[str]:
    """Return the sorted names of a group's options, such as "search" in "sharder"."""
    return sorted(path.stem for path in (CONF_DIR / group).glob("*.yaml"))


def option_node(group: str, name: str) -> DictConfig:
    """Return the content of an option's file."""
    node = OmegaConf.load(CONF_DIR / group / f"{name}.yaml")
    assert isinstance(node, DictConfig)
    return node
