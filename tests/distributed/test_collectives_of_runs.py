"""All ranks issue the same collectives while a run goes on, is traced, saved and preempted.

The whole command runs on synthetic ranks, see `fake_job`. As these receive what rank 0 sends, each
rank writes its parts of a checkpoint to a folder of its own, and all go on from a checkpoint that a
job of one rank has written.
"""

import os
import signal
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from torchrec.datasets.utils import Batch

from dlrm_sharded.checkpoint import saver, storage
from dlrm_sharded.checkpoint.folder import checkpoints, partial_path
from dlrm_sharded.datasets.synthetic import SyntheticDataset
from dlrm_sharded.files import remote_files
from dlrm_sharded.files.errors import PreemptedError
from dlrm_sharded.job import owned_folder
from dlrm_sharded.ranks.distributed import Rank
from dlrm_sharded.training import meeting
from dlrm_sharded.training.pipelines import PIPELINES
from tests.conftest import SMALL_RUN
from tests.distributed.fake_job import disagreement, run_in_turn
from tests.distributed.test_collectives import train_command
from tests.unit.commands.conftest import composed as composed

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of torch, in what TorchRec loads
]

RUN = (
    *SMALL_RUN,
    *("trainer.eval_every_steps=5", "trainer.num_eval_batches=2", "data.pregenerate=false"),
    *("trainer.checkpoint.every_steps=4", "trainer.checkpoint.every_s=null"),
    "sharder.replicate=never",  # some pipelines train no replicas
)
TRACED = (
    "trainer.num_steps=16",
    "trainer.trace=true",
    "trainer.trace_steps=2",
    "trainer.num_warmup_steps=1",
)
STOPPED_AT = 9
"""Number of batches that rank 0 has read when it receives the signal."""


class AtOnce:
    """Stands for the thread of a saver, so that collectives have one order."""

    def __init__(self, *args: object) -> None:
        pass

    def submit(self, work: Callable[..., Any], *args: Any) -> "Future[Any]":
        done: Future[Any] = Future()
        done.set_result(work(*args))
        return done

    def shutdown(self) -> None:
        pass


@pytest.fixture
def one_rank(tmp_path: Path, composed: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Path:
    """The checkpoint of a job of one rank after four steps."""
    folder = tmp_path / "one_rank"
    overrides = (*RUN, "trainer.num_steps=4", f"hydra.runtime.output_dir={folder}")
    train = train_command(composed("train", *overrides), monkeypatch)
    run_in_turn(train, 1)
    return checkpoints(folder)[0]


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_a_run_goes_on_until_it_is_preempted(pipeline, one_rank, tmp_path, composed, monkeypatch):
    """On two hosts of two ranks; half of the cases have a saver with a thread."""
    world_size = 4
    background = "true" if pipeline == "base" else "false"
    folder = tmp_path / "run"
    cfg = composed(
        "train",
        *(*RUN, *TRACED, f"trainer.pipeline={pipeline}", f"resume={one_rank}"),
        f"trainer.checkpoint.background={background}",
        f"hydra.runtime.output_dir={folder}",
    )
    monkeypatch.setattr(saver, "ThreadPoolExecutor", AtOnce)
    monkeypatch.setattr(meeting, "INTERVAL_S", 0.0)  # the ranks meet after every batch
    keep_own_parts(monkeypatch)
    share_a_disk(monkeypatch)
    train = train_command(cfg, monkeypatch)
    stop_rank_0_while_it_reads(monkeypatch)

    def run(rank: Rank) -> str:
        parts = tmp_path / f"parts-{rank.rank}"
        monkeypatch.setattr(saver, "partial_path", partial_path if rank.is_zero else _inside(parts))
        with pytest.raises(PreemptedError) as stopped:
            train(rank)
        return str(stopped.value)

    by_rank, ends = run_in_turn(run, world_size, local_world_size=2)
    assert disagreement(by_rank) is None
    assert "SIGTERM stopped the training after step " in ends[0]
    assert ends == ends[:1] * world_size
    assert len(list((folder / "trace").iterdir())) == world_size
    assert checkpoints(folder)
    for number in range(1, world_size):
        assert list((tmp_path / f"parts-{number}").rglob("*.safetensors")), f"of rank {number}"
    names = {collective.name for collective in by_rank[0]}
    assert names >= {"new_group", "all_reduce", "all_gather", "broadcast"}


def _inside(folder: Path) -> Callable[[Path], Path]:
    def of_rank(final: Path) -> Path:
        path = folder / final.name
        path.mkdir(parents=True, exist_ok=True)
        return path

    return of_rank


def keep_own_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a rank know which parts it has itself; those of all others are like rank 0's."""
    gathered = storage._gathered

    def with_own(of_rank: Any, group: Any) -> list[Any]:
        by_rank = gathered(of_rank, group)
        by_rank[group.rank()] = of_rank
        return by_rank

    monkeypatch.setattr(storage, "_gathered", with_own)


def share_a_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ranks see the files of ranks whose turn is later."""
    hosts_apart = owned_folder._hosts_apart
    monkeypatch.setattr(remote_files, "LATE_S", 0.0)

    def none_apart(*args: Any) -> dict[str, str]:
        hosts_apart(*args)
        return {}

    monkeypatch.setattr(owned_folder, "_hosts_apart", none_apart)


def stop_rank_0_while_it_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Send the signal of a scheduler once, which rank 0 receives, as its turn comes first."""
    batch = SyntheticDataset.batch
    read = []

    def counted(self: SyntheticDataset, split: Any, *args: Any, **of: Any) -> Batch:
        is_trained = signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
        if split == "train" and is_trained:
            read.append(split)
            if len(read) == STOPPED_AT:
                os.kill(os.getpid(), signal.SIGTERM)
        return batch(self, split, *args, **of)

    monkeypatch.setattr(SyntheticDataset, "batch", counted)
