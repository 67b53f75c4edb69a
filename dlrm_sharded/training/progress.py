"""The state from which a trainer continues where another process stopped."""

from __future__ import annotations

import dataclasses
import json
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dlrm_sharded.checkpoint.logical import LogicalTensor
from dlrm_sharded.checkpoint.manifest import Manifest
from dlrm_sharded.checkpoint.restore import RANK_PREFIX, load_whole
from dlrm_sharded.files.errors import CheckpointError
from dlrm_sharded.ranks.distributed import Rank
from dlrm_sharded.training.best import Best
from dlrm_sharded.training.metrics import Evaluation

NO_EVALUATION = Evaluation(auroc=None, normalized_entropy=None, num_samples=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """State of a training run between two steps, besides the model's.

    Args:
        step: number of steps trained.
        loss: mean loss of the last logged steps; nan before the first.
        evaluation: result of the last evaluation.
        evaluated_step: number of steps before it.
        best: the best evaluation by a metric; None if the run does not compare evaluations.
        steady_s: time that the steps after the warm-up took, with everything between them.
        window_losses: [number of steps since the last logged one], losses of this rank.
        step_ms: [N], times of the steps that count for the throughput.
        ids_out_of_range: number of ids beyond each table's rows, by its name.
    """

    step: int = 0
    loss: float = math.nan
    evaluation: Evaluation = NO_EVALUATION
    evaluated_step: int = 0
    best: Best | None = None
    steady_s: float = 0.0
    window_losses: Tensor = field(default_factory=lambda: torch.empty(0))
    step_ms: Tensor = field(default_factory=lambda: torch.empty(0))
    ids_out_of_range: Mapping[str, int] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return what all ranks have in common."""
        return {
            "loss": None if math.isnan(self.loss) else self.loss,
            "evaluation": dataclasses.asdict(self.evaluation),
            "evaluated_step": self.evaluated_step,
            "best": None if self.best is None else dataclasses.asdict(self.best),
            "steady_s": self.steady_s,
            "ids_out_of_range": dict(self.ids_out_of_range),
        }

    def tensors(self, rank: Rank) -> dict[str, LogicalTensor]:
        """Return what belongs to one rank, and the state of its random number generators."""
        of_rank = {"losses": self.window_losses.float().cpu(), **_generator_states(rank)}
        if rank.is_zero:
            of_rank["step_ms"] = self.step_ms.float()
        return {
            f"{RANK_PREFIX}{rank.rank}.{name}": LogicalTensor.whole(tensor)
            for name, tensor in of_rank.items()
            if tensor.numel()
        }


def read_progress(manifest: Manifest, rank: Rank, *, same_plan: bool) -> Progress:
    """Return the progress of a checkpoint, and set the rank's random number generators.

    With another number of ranks, every rank gets the mean of the losses that are not logged yet,
    and the generators of additional ranks keep their seeds.

    Args:
        same_plan: whether the run continues under the same plan, so that earlier step times count.
    """
    try:
        return _read_progress(manifest, rank, same_plan=same_plan)
    except (LookupError, TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise CheckpointError(
            f"{manifest.folder}: the trainer's own state is not as this version writes it: {error}"
        ) from error


def read_best(progress: Mapping[str, Any]) -> Best | None:
    """Return the best evaluation in a checkpoint's progress; None if it has none."""
    best = progress.get("best")
    return None if best is None else Best(**best)


def _read_progress(manifest: Manifest, rank: Rank, *, same_plan: bool) -> Progress:
    fields = manifest.state.progress
    loss = fields["loss"]
    step_ms = _of_rank(manifest, 0, "step_ms") if same_plan and rank.is_zero else None
    progress = Progress(
        step=manifest.state.step,
        loss=math.nan if loss is None else float(loss),
        evaluation=Evaluation(**fields["evaluation"]),
        evaluated_step=int(fields["evaluated_step"]),
        best=read_best(fields),
        steady_s=float(fields["steady_s"]),
        window_losses=_window_losses(manifest, rank),
        step_ms=torch.empty(0) if step_ms is None else step_ms,
        ids_out_of_range={str(k): int(n) for k, n in fields.get("ids_out_of_range", {}).items()},
    )
    _restore_generators(manifest, rank)
    return progress


def _window_losses(manifest: Manifest, rank: Rank) -> Tensor:
    world_size = manifest.state.world_size
    if world_size == rank.world_size:
        mine = _of_rank(manifest, rank.rank, "losses")
        return torch.empty(0) if mine is None else mine
    of_ranks = [_of_rank(manifest, writer, "losses") for writer in range(world_size)]
    known = [losses for losses in of_ranks if losses is not None]
    return torch.stack(known).mean(0) if known else torch.empty(0)


def _of_rank(manifest: Manifest, rank: int, name: str) -> Tensor | None:
    key = f"{RANK_PREFIX}{rank}.{name}"
    return load_whole(manifest, key) if key in manifest.tensors else None


def _generator_states(rank: Rank) -> dict[str, Tensor]:
    """Return the states of the global generators of torch, Python and numpy."""
    version, numbers, gauss = random.getstate()
    _, keys, *rest = np.random.get_state(legacy=True)
    text = json.dumps([[version, list(numbers), gauss], [np.asarray(keys).tolist(), *rest]])
    states = {
        "torch": torch.get_rng_state(),
        "python": torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8),
    }
    if rank.device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(rank.device)
    return states


def _restore_generators(manifest: Manifest, rank: Rank) -> None:
    states: Mapping[str, Tensor | None] = {
        name: _of_rank(manifest, rank.rank, name) for name in ("torch", "python", "cuda")
    }
    if (state := states["torch"]) is not None:
        torch.set_rng_state(state)
    if (state := states["python"]) is not None:
        (version, numbers, gauss), (keys, *rest) = json.loads(bytes(state.tolist()))
        random.setstate((version, tuple(numbers), gauss))
        np.random.set_state(("MT19937", np.array(keys, dtype=np.uint32), *rest))
    if (state := states["cuda"]) is not None and rank.device.type == "cuda":
        torch.cuda.set_rng_state(state, rank.device)
