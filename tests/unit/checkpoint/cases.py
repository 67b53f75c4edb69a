"""Synthetic checkpoints, and what ranks write of any state."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from dlrm_sharded.checkpoint.folder import checkpoint_path, checkpoints
from dlrm_sharded.checkpoint.logical import LogicalTensor, Piece
from dlrm_sharded.checkpoint.manifest import FILE_NAME, RunState, _checksum
from dlrm_sharded.checkpoint.model_state import ModelState
from dlrm_sharded.checkpoint.saver import CheckpointConfig, Saver
from dlrm_sharded.ranks.distributed import Rank
from dlrm_sharded.training.checkpoints import Checkpoints

PART = "rank-00000-00000.safetensors"
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


def write(
    run_dir: Path,
    rank: Rank,
    *steps: int,
    keep: int = 2,
    background: bool = False,
    state: Mapping[str, LogicalTensor] = STATE,
    **fields: Any,
) -> Path:
    """Let the ranks write checkpoints, as a run does; return the last one."""
    saver = Saver(run_dir, keep=keep, background=background, rank=rank)
    for step in steps or (5,):
        saver.save(state, run_state(step, **fields))
    saver.close()
    assert saver.failure is None
    return checkpoint_path(run_dir, step)


def checkpoints_of_run(
    run_dir: Path,
    rank: Rank,
    state: Mapping[str, LogicalTensor],
    *,
    in_background: bool,
    **config: Any,
) -> Checkpoints:
    """What a trainer of a model with this state saves."""
    settings = CheckpointConfig(**config)
    return Checkpoints(
        Saver(run_dir, keep=settings.keep, background=in_background, rank=rank),
        settings,
        ModelState(state, {}, {}, {}, {}),
        describe=lambda progress: run_state(
            progress.step,
            progress=progress.to_json(),
            best_step=None if progress.best is None else progress.best.step,
        ),
        rank=rank,
    )


def steps_in(run_dir: Path) -> list[int]:
    """The steps of a run's whole checkpoints, the latest first."""
    return [int(path.name.removeprefix("step-")) for path in checkpoints(run_dir)]


def lie(checkpoint: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the manifest, and make its checksum right."""
    path = checkpoint / FILE_NAME
    fields = json.loads(path.read_text())
    del fields["crc32"]
    change(fields)
    path.write_text(json.dumps({**fields, "crc32": _checksum(fields)}))
