"""A job that is started again goes on in its own folder."""

from pathlib import Path

import pytest

from tests import preloaded
from tests.conftest import SMALL_RUN
from tests.e2e.runs import LAUNCHERS, environment, result_of

pytestmark = pytest.mark.slow
OWN_DATASETS = Path(__file__).parent


def run(folder: Path, *overrides: str, exit_code: int = 0) -> preloaded.Ended:
    """Train in `folder`, where the runs go to the default place."""
    return preloaded.run(
        *(*LAUNCHERS["ours"], "2", "--max-restarts", "1", "-m", "dlrm_sharded.train"),
        *("sharder=dim", *SMALL_RUN, "data._target_=own_datasets.KillsRankZeroOnce"),
        *("data.pregenerate=false", *overrides),
        cwd=folder,
        exit_code=exit_code,
        env=environment() | {"PYTHONPATH": f"{environment()['PYTHONPATH']}:{OWN_DATASETS}"},
    )


def test_a_restart_has_the_folder_of_its_first_start(tmp_path):
    done = run(tmp_path)
    assert "was killed by SIGKILL" in done.stderr
    assert "(restart 1)" in done.stderr
    (folder,) = (tmp_path / "runs").glob("*/dim")
    assert result_of(folder)["steps"] == 12

    refused = run(tmp_path, "batch_size=255", exit_code=2)
    assert "start again" not in refused.stderr
    assert refused.stderr.splitlines()[-1].endswith("must be a multiple of the 2 ranks")
    assert len(list((tmp_path / "runs").glob("*/dim"))) == 2
