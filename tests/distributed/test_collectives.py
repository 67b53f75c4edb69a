"""All ranks issue the same collectives in the same order, which NCCL needs and gloo forgives.

The ranks of these jobs run one after the other in this process and send nothing, see `fake_job`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from omegaconf import DictConfig, open_dict
from torchrec.datasets.utils import Batch

from dlrm_sharded.commands import train as command
from dlrm_sharded.datasets.synthetic import SyntheticDataset
from dlrm_sharded.ranks.distributed import Rank
from dlrm_sharded.training.pipelines import PIPELINES
from tests.conftest import SMALL_RUN
from tests.distributed.fake_job import disagreement, run_in_turn
from tests.distributed.small_model import PLANS, global_batches, share, train_and_evaluate
from tests.unit.commands.conftest import composed as composed

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of torch, in what TorchRec loads
]


@pytest.mark.parametrize(
    ("kind", "pipeline"), [(kind, name) for kind in (*PLANS, "host_rows") for name in PIPELINES]
)
def test_steps_on_two_hosts(kind, pipeline):
    shares = [share(batch, 0) for batch in global_batches(4)]
    by_rank, losses = run_in_turn(
        lambda rank: train_and_evaluate(rank, kind, shares, pipeline=pipeline),
        4,
        local_world_size=2,
    )
    assert disagreement(by_rank) is None
    assert losses == losses[:1] * 4
    names = {collective.name for collective in by_rank[0]}
    assert names >= {"new_group", "all_reduce", "broadcast"}
    assert ("all_to_all" in names) == (kind != "replicas")
    has_row_blocks = kind in ("row_wise", "rows_and_columns", "host_rows", "replicas_and_others")
    assert ("reduce_scatter" in {c.name for c in by_rank[-1]}) == has_row_blocks


def skip_the_last_sum(rank: Rank) -> None:
    for _ in range(3 - (rank.rank == 2)):
        dist.all_reduce(torch.ones(1))


def sum_other_sizes(rank: Rank) -> None:
    dist.all_reduce(torch.ones(1 + rank.rank // 2))


def use_groups_in_another_order(rank: Rank) -> None:
    groups = [dist.group.WORLD, dist.new_group()]
    for group in groups if rank.is_zero else reversed(groups):
        dist.all_reduce(torch.ones(1), group=group)


def receive_more_than_others_send(rank: Rank) -> None:
    splits = [1] * rank.world_size
    received = [1, 1, 2] if rank.rank == 1 else splits
    dist.all_to_all_single(torch.ones(sum(received)), torch.ones(3), received, splits)


MISTAKES = (
    skip_the_last_sum,
    sum_other_sizes,
    use_groups_in_another_order,
    receive_more_than_others_send,
)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_finds_mistakes(mistake):
    assert disagreement(run_in_turn(mistake, 3)[0]) is not None


def train_command(cfg: DictConfig, monkeypatch: pytest.MonkeyPatch) -> Callable[[Rank], Any]:
    """Return the command of a synthetic rank; all ranks read the batches of rank 0."""
    with open_dict(cfg):
        del cfg["hydra"]  # as Hydra does before it calls the command
    batch = SyntheticDataset.batch

    def batch_of_rank_0(*args: Any, rank: int, world_size: int) -> Batch:
        return batch(*args, rank=0, world_size=world_size)

    monkeypatch.setattr(SyntheticDataset, "batch", batch_of_rank_0)

    def run(rank: Rank) -> Any:
        @contextmanager
        def joined(**_: Any) -> Iterator[Rank]:
            yield rank

        monkeypatch.setattr(command, "process_group", joined)
        return command.train(cfg)

    return run


def test_training_job(tmp_path, monkeypatch, composed):
    """The whole command: planning, measuring, steps, logs, evaluations, the result."""
    cfg = composed(
        "train",
        *(*SMALL_RUN, "trainer.eval_every_steps=5", "trainer.num_eval_batches=2"),
        *("data.pregenerate=false", "measure.iterations=4", "exchange_precision=fp16"),
        "trainer.checkpoint.every_s=null",  # their files are written by threads
        f"hydra.runtime.output_dir={tmp_path}",
    )
    train = train_command(cfg, monkeypatch)
    by_rank, objectives = run_in_turn(train, 4, local_world_size=2)
    assert disagreement(by_rank) is None
    assert objectives == objectives[:1] * 4
    assert (tmp_path / "result.json").exists()
