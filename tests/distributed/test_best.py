"""Ranks keep the same best checkpoint and end at the same step, and train as without both."""

from pathlib import Path
from typing import Any

import pytest
import torch

from dlrm_sharded.checkpoint.manifest import read_manifest
from dlrm_sharded.checkpoint.model_state import model_state
from dlrm_sharded.checkpoint.restore import load_whole
from dlrm_sharded.ranks.distributed import Rank
from dlrm_sharded.training import steps as steps_module
from dlrm_sharded.training.best import Best
from dlrm_sharded.training.metrics import Evaluation
from dlrm_sharded.training.trainer_config import TrainerConfig
from tests.distributed.small_model import TABLES, make_plan, make_sharded, run_trainer
from tests.preloaded.ranks import gathered, run_ranks
from tests.unit.checkpoint.cases import checkpoints_of_run, steps_in

AUROCS = ((0.5, 0.75, 0.625, 0.5, 0.9), (0.9, 0.5, 0.625, 0.7, 0.8))
"""Each rank finds other values, and all must agree on those of rank 0."""


def train(rank: Rank, folder: str, *, compares: bool) -> list[tuple[int, Best | None, list[int]]]:
    """Train six steps, or until patience ends; what all ranks have done."""
    aurocs = iter(AUROCS[rank.rank])
    evaluate = steps_module.evaluate

    def evaluated(*args: Any, **options: Any) -> Evaluation:
        evaluate(*args, **options)
        return Evaluation(next(aurocs), 0.5, num_samples=8)

    steps_module.evaluate = evaluated
    kind, every = "columns_uneven", {"every_steps": 1 if not compares else 1000, "keep": 9}
    sharded, optimizer = make_sharded(rank, kind, "rowwise_adagrad")
    plan = make_plan(kind, rank.world_size)
    state = model_state(sharded, optimizer, plan, TABLES, embedding_optimizer="rowwise_adagrad")
    saves = checkpoints_of_run(Path(folder), rank, state.tensors, in_background=False, **every)
    config = TrainerConfig(
        num_steps=5,
        eval_every_steps=1,
        checkpoint=saves._config,
        **({"keep_best": "auroc", "patience": 2} if compares else {}),
    )
    result = run_trainer(rank, sharded, optimizer, config, checkpoints=saves)
    steps_module.evaluate = evaluate
    return gathered(rank, (result.num_steps, result.best, steps_in(Path(folder))))


@pytest.mark.parametrize("world_size", [1, 2])
def test_ranks_agree(world_size, tmp_path):
    best = Best("auroc", 0.75, step=2, num_worse=2)
    done = run_ranks(train_compared, world_size, str(tmp_path / "compared"))
    assert done == [(4, best, [4, 2, 1])] * world_size
    done = run_ranks(train_all, world_size, str(tmp_path / "all"))
    assert done == [(5, None, [5, 4, 3, 2, 1])] * world_size
    for step in (2, 4):
        compared, alone = (
            read_manifest(tmp_path / name / "checkpoints" / f"step-000000000{step}")
            for name in ("compared", "all")
        )
        assert compared.tensors.keys() == alone.tensors.keys()
        for name in compared.tensors:
            if not name.startswith("ranks."):
                assert torch.equal(load_whole(compared, name), load_whole(alone, name)), name


def train_compared(rank: Rank, folder: str) -> Any:
    return train(rank, folder, compares=True)


def train_all(rank: Rank, folder: str) -> Any:
    return train(rank, folder, compares=False)
