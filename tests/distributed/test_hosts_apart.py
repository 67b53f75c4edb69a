"""Hosts without a common disk write no checkpoint that has parts on each of them."""

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dlrm_sharded.checkpoint import storage
from dlrm_sharded.checkpoint.folder import checkpoints
from dlrm_sharded.checkpoint.logical import LogicalTensor, Piece
from dlrm_sharded.checkpoint.manifest import check_parts, read_manifest
from dlrm_sharded.checkpoint.saver import CheckpointConfig, Saver
from dlrm_sharded.files import remote_files
from dlrm_sharded.files.errors import ConfigError
from dlrm_sharded.files.remote_files import RemotePath
from dlrm_sharded.job.owned_folder import RunFolder, with_checkpoints
from dlrm_sharded.ranks.distributed import Rank
from tests.hosts import become_host, own_disk, read_only, why_no_hosts
from tests.object_store import web_hdfs
from tests.preloaded.ranks import gathered, run_ranks
from tests.unit.checkpoint.cases import TABLE, run_state

ON = CheckpointConfig(every_s=600)


def on_two_hosts(
    rank: Rank, path: Path, config: CheckpointConfig | None, mounts: list[str], writes: bool
) -> list[Any]:
    """What the ranks find, as rank 0 of node0 and rank 1 of node1, which has the mounts."""
    become_host(f"node{rank.rank}", *(mounts if rank.rank else []))
    remote_files.LATE_S = 0.5
    trainer = SimpleNamespace(checkpoint=config)
    settings: Any = SimpleNamespace(trainer=trainer, dry_run=not writes)
    try:
        found = with_checkpoints(RunFolder(path, lambda: None), settings, rank)
    except ConfigError as error:
        return gathered(rank, str(error))
    return gathered(rank, (found.host, found.checkpoints_in))


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(why_no_hosts() is not None, reason=str(why_no_hosts())),
]


@pytest.mark.parametrize(
    ("harm", "problem"),
    [
        ("a disk of its own", "No such file or directory"),
        ("may only read", "Read-only file system"),
    ],
)
def test_hosts_that_do_not_write_to_one_folder_are_named(harm, problem, tmp_path):
    mounts = [own_disk(tmp_path)] if harm == "a disk of its own" else read_only(tmp_path)
    said, of_node1 = run_ranks(on_two_hosts, 2, tmp_path, ON, mounts, True)
    assert said == of_node1
    assert said.startswith(f"not all hosts can write to {tmp_path}, where")
    assert f": node1 ({problem}). Set hydra.run.dir to a folder that all hosts share" in said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("config", [None, CheckpointConfig(), ON], ids=["none", "off", "dry"])
def test_without_checkpoints_the_host_of_the_results_is_known(config, tmp_path):
    writes = config is not ON
    found = run_ranks(on_two_hosts, 2, tmp_path, config, [own_disk(tmp_path)], writes)
    assert found == [("node0", tmp_path)] * 2


def test_a_shared_folder(tmp_path):
    assert run_ranks(on_two_hosts, 2, tmp_path, ON, [], True) == [(None, tmp_path)] * 2


def test_an_object_store_takes_the_place_of_a_common_disk(tmp_path):
    path = tmp_path / "run"
    path.mkdir()
    with web_hdfs(tmp_path / "store") as url:
        config = CheckpointConfig(every_s=600, folder=f"{url}/run")
        found = run_ranks(on_two_hosts, 2, path, config, [own_disk(path)], True)
        assert found == [("node0", RemotePath(f"{url}/run"))] * 2
        assert RemotePath(url).entries() == {"run": None}
        assert RemotePath(f"{url}/run").entries() == {}


def two_halves(rank: Rank) -> dict[str, LogicalTensor]:
    half = Piece((5 * rank.rank, 0), TABLE[5 * rank.rank :][:5])
    return {"tables.t.weight": LogicalTensor((10, 6), TABLE.dtype, (half,))}


def save_where_one_rank_writes_elsewhere(rank: Rank, path: Path) -> list[Any]:
    logging.disable()
    remote_files.LATE_S = 0.5
    saver = Saver(path, keep=1, background=False, rank=rank)
    saver.save(two_halves(rank), run_state(1))
    first = saver.failure
    write = storage.write_durably
    if rank.rank == 1:
        storage.write_durably = lambda path, content: None
    saver.save(two_halves(rank), run_state(2))
    second = saver.failure
    storage.write_durably = write
    saver.close()
    return [first, second, *(str(path) for path in checkpoints(path))]


def test_a_checkpoint_counts_when_rank_zero_sees_all_parts(tmp_path):
    first, second, path = run_ranks(save_where_one_rank_writes_elsewhere, 2, tmp_path)
    assert first is None
    assert second.startswith("rank 0 does not find rank-00001-00000.safetensors in ")
    assert second.endswith("as it was written; all hosts must share this folder (rank 0)")
    assert path.endswith("step-0000000001")
    check_parts(read_manifest(Path(path)))
