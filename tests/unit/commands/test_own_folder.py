"""A job owns the folder of its run before Hydra writes there; its log costs no run."""

from contextlib import nullcontext
from pathlib import Path

import pytest
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

from dlrm_sharded.commands.own_folder import OwnRunFolder
from dlrm_sharded.ranks.attempt import started
from dlrm_sharded.runs.owner import claim
from tests.unit.commands.conftest import composed_config


def test_a_name_with_parts_of_hydras_config(tmp_path):
    """The default name has one: Hydra passes over errors of the callback."""
    OmegaConf.register_new_resolver("started", started, use_cache=True, replace=True)
    name = f"hydra.run.dir={tmp_path}/${{hydra:runtime.choices.sharder}}/${{started:%H%M%S%f}}"
    config = composed_config("train", "sharder=dim", name, return_hydra_config=True)
    OwnRunFolder().on_run_start(config)
    assert not HydraConfig.initialized()
    (claimed,) = (tmp_path / "dim").glob("*/.owner")
    HydraConfig.instance().set_config(config)
    try:
        assert Path(config.hydra.run.dir) == claimed.parent
    finally:
        HydraConfig.instance().cfg = None
        claim(claimed.parent).release()


def test_a_former_run_is_refused_before_torch_is_loaded(tmp_path, capsys, no_torchrun):
    (tmp_path / "plan.json").touch()
    for resume in ("auto", "null"):
        overrides = f"hydra.run.dir={tmp_path}", f"resume={resume}"
        config = composed_config("train", *overrides, return_hydra_config=True)
        with pytest.raises(SystemExit) if resume == "null" else nullcontext():
            OwnRunFolder().on_run_start(config)
    assert "already has a run; give another hydra.run.dir" in capsys.readouterr().err
    claim(tmp_path).release()


@pytest.mark.parametrize("begin", ["on_run_start", "on_multirun_start"])
def test_a_password_is_refused_before_hydra_writes_it(begin, tmp_path, capsys, no_torchrun):
    config = composed_config(
        "train",
        *(f"hydra.run.dir={tmp_path / 'run'}", "resume='s3://me:secret@host/run'"),
        return_hydra_config=True,
    )
    with pytest.raises(SystemExit) as ended:
        getattr(OwnRunFolder(), begin)(config)
    assert ended.value.code == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("error: resume has a password")
    assert "secret" not in line
    assert not list(tmp_path.iterdir())
