"""A job owns the folder of its run before Hydra writes there, whatever its name is made of."""

from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig

from dlrm_sharded.commands.hydra_app import CONF_DIR
from dlrm_sharded.commands.own_folder import OwnRunFolder
from dlrm_sharded.runs.owner import claim


def test_a_name_with_parts_of_hydras_config(tmp_path: Path) -> None:
    """The default name has one: Hydra passes over errors of the callback."""
    folder = tmp_path / "dim"
    (folder / ".hydra").mkdir(parents=True)
    name = f"hydra.run.dir={tmp_path}/${{hydra:runtime.choices.sharder}}"
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF_DIR)):
        config = compose("train", ["sharder=dim", name], return_hydra_config=True)
    try:
        OwnRunFolder().on_run_start(config)
        assert (folder / ".owner-1").exists()
        assert config.hydra.output_subdir is None, "a former run's config stays"
        assert not HydraConfig.initialized()
    finally:
        claim(folder).release()
