"""Made-up checkpoints, written by one rank."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dlrm_sharded.checkpoint.folder import checkpoint_path
from dlrm_sharded.checkpoint.logical import LogicalTensor, Piece
from dlrm_sharded.checkpoint.manifest import RunState
from dlrm_sharded.checkpoint.saver import Saver
from dlrm_sharded.ranks.distributed import Rank

TABLE = torch.arange(60, dtype=torch.float32).reshape(10, 6)
STATE = {
    "tables.t.weight": LogicalTensor(
        (10, 6), torch.float32, (Piece((0, 0), TABLE[:, :4]), Piece((0, 4), TABLE[:, 4:]))
    ),
    "dense.over.bias": LogicalTensor.whole(torch.tensor([1.5, -2.0])),
    "optimizer.over.bias.step": LogicalTensor.whole(torch.tensor(7.0)),
}


def run_state(step: int = 5, **changes: Any) -> RunState:
    fields: dict[str, Any] = {
        "run": "the run",
        "step": step,
        "batch_size": 4,
        "seed": 0,
        "epoch_batches": 3,
        "world_size": 1,
        "optimizers": {"embedding": "sgd"},
        "column_bounds": {"t": (0, 4, 6)},
        "progress": {"loss": None},
        "plan": {"shards": []},
        "config": {"seed": 0},
        "events": ("events.out.tfevents.1", 100),
    }
    return RunState(**fields | changes)


def write(run_dir: Path, rank: Rank, *, step: int = 5, keep: int = 2) -> Path:
    saver = Saver(run_dir, keep=keep, background=False, rank=rank)
    saver.save(STATE, run_state(step))
    saver.close()
    assert saver.failure is None
    return checkpoint_path(run_dir, step)


def filled(shape: tuple[int, ...]) -> Tensor:
    return torch.full(shape, float("nan"))
