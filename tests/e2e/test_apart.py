"""Two hosts without a common disk: a message at the start, or checkpoints in an object store."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from dlrm_sharded.files.remote_files import RemotePath
from tests.conftest import SMALL_RUN
from tests.e2e.runs import events_of
from tests.hosts import on_host, why_no_hosts
from tests.object_store import web_hdfs
from tests.preloaded.ranks import HANGS_S, environments

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(why_no_hosts() is not None, reason=str(why_no_hosts())),
]


def train_on_hosts(*folders: Path, run_dir: Path, overrides: list[str]) -> list[tuple[int, str]]:
    """Return how a rank ends on each host, and what it writes; a host has its folder as run_dir."""
    run_dir.mkdir(exist_ok=True)
    ranks = []
    for rank, (folder, of_rank) in enumerate(
        zip(folders, environments(len(folders), 1), strict=True)
    ):
        folder.mkdir(exist_ok=True)
        command = [*on_host(f"node{rank}", f"--bind {folder} {run_dir}"), sys.executable]
        command += ["-m", "dlrm_sharded.train", f"hydra.run.dir={run_dir}", *SMALL_RUN, *overrides]
        ranks.append(
            subprocess.Popen(
                command, env=of_rank, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
            )
        )
    try:
        said = [rank.communicate(timeout=HANGS_S)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return [(rank.returncode, text) for rank, text in zip(ranks, said, strict=True)]


def test_a_run_goes_on_from_an_object_store_on_other_hosts(tmp_path):
    """Every tenth request fails, and rank 0 is on the host that had rank 1."""
    run_dir, a, b = tmp_path / "run", tmp_path / "a", tmp_path / "b"
    with web_hdfs(tmp_path / "store") as url:
        home = RemotePath(url) / "mine"
        kept = [f"trainer.checkpoint.folder={home}", "trainer.checkpoint.every_steps=4"]
        ends = train_on_hosts(a, b, run_dir=run_dir, overrides=kept)
        assert [code for code, _ in ends] == [0, 0], ends
        said = ends[0][1]
        assert f"results in       {run_dir} on host node0" in said
        assert f"checkpoints in   {home}/checkpoints, beside copies of the results" in said
        for name in ("result.json", "plan.json", "task.json", ".hydra/config.yaml"):
            assert (home / name).read_bytes() == (a / name).read_bytes(), name

        longer = [*kept, "trainer.num_steps=24", "resume=auto"]
        ends = train_on_hosts(b, a, run_dir=run_dir, overrides=longer)
        assert [code for code, _ in ends] == [0, 0], ends
        assert f"resuming at step 12 from {home}/checkpoints/step-0000000012" in ends[0][1]
        assert json.loads((home / "result.json").read_bytes())["steps"] == 24
    steps = [event.step for event in events_of(b).Scalars("train/loss")]
    assert steps == sorted({*steps}) == [4, 8, 12, 16, 20, 24]
