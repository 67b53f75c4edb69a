"""Save under random plans of 1 to 3 ranks, and load each checkpoint under all the other plans."""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dlrm_sharded.checkpoint.folder import checkpoints
from dlrm_sharded.checkpoint.logical import LogicalTensor, Piece
from dlrm_sharded.checkpoint.manifest import Manifest, check_parts, read_manifest
from dlrm_sharded.checkpoint.model_state import (
    ModelState,
    column_bounds,
    model_state,
    state_key,
)
from dlrm_sharded.checkpoint.restore import load_model, load_whole
from dlrm_sharded.checkpoint.saver import Saver
from dlrm_sharded.files.text_table import TextTable
from dlrm_sharded.plans.plan import ShardingPlan
from dlrm_sharded.ranks.distributed import Rank, process_group
from tests.soak.folders import folder_of
from tests.soak.outcomes import scalars
from tests.soak.random_plans import TABLES, layouts, random_plan, sharded, train
from tests.soak.ranks import run_state, start
from tests.soak.training_run import SMALL, TrainingRun

OPTIMIZERS = ("sgd", "rowwise_adagrad", "elementwise_adagrad", "adam")
"""Adam's state is made up, without a model, as FBGEMM has no Adam for CPUs."""

WORLD_SIZES = (1, 2, 3)
RELATIVE_ERROR = 1e-6
"""Tolerance for state that is a mean of several shards' states."""


SETUPS = ((1, "dim"), (2, "dim"), (2, "search"), (3, "search"), (3, "size"), (2, "dim"))
"""Numbers of ranks and sharders under which a whole run goes on in turn."""

STEPS_OF_SETUP = 10
LOG_INTERVAL = 5
LOSS_RELATIVE_ERROR = 1e-3


@dataclass(frozen=True, slots=True)
class Change:
    """A checkpoint that was loaded under another plan.

    Args:
        was, now: number of ranks.
        converted: number of pieces of row-wise state that was converted to other columns.
        faults: names of tensors that are not what was saved.
    """

    optimizer: str
    was: int
    now: int
    converted: int
    faults: tuple[str, ...]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--plans", type=int, default=4, help="random plans for each number of ranks [%(default)s]"
    )
    parser.add_argument("--seed", type=int, default=6, help="seed of the plans [%(default)s]")
    parser.add_argument("--folder", type=Path, help="for checkpoints; by default none is kept")


def run(options: argparse.Namespace) -> int:
    with folder_of(options.folder) as folder:
        changes = reshard(folder, num_plans=options.plans, seed=options.seed)
        faults = whole_run_faults(folder)
    print(table(changes))
    found = Counter(
        x for w in WORLD_SIZES for p in _plans(w, options.plans, options.seed) for x in layouts(p)
    )
    print(f"plans with {', '.join(f'{name}: {n}' for name, n in sorted(found.items()))}")
    print(f"a run under {len(SETUPS)} plans in turn had {len(faults)} other losses")
    print("\n".join(faults))
    return 1 if faults or any(change.faults for change in changes) else 0


def whole_run_faults(folder: Path, setups: Sequence[tuple[int, str]] = SETUPS) -> list[str]:
    """Let one run go on under one plan after another; return where its losses differ.

    They are those of an undisturbed run except for rounding, as SGD has no state to convert.

    Args:
        setups: numbers of ranks, and sharders.
    """
    num_steps = STEPS_OF_SETUP * len(setups)
    undisturbed = _new_run(folder / "undisturbed", num_ranks=1, sharder=setups[0][1])
    _train_to(undisturbed, num_steps)
    for number, (num_ranks, sharder) in enumerate(setups, start=1):
        # It is the same run, as it has the same folder.
        trained = _new_run(folder / "changed", num_ranks=num_ranks, sharder=sharder)
        _train_to(trained, STEPS_OF_SETUP * number)
    mine, expected = scalars(folder / "changed"), scalars(folder / "undisturbed")
    faults = []
    for step in range(LOG_INTERVAL, num_steps + 1, LOG_INTERVAL):
        losses, (loss,) = mine.get(("train/loss", step), []), expected["train/loss", step]
        if len(losses) != 1 or abs(losses[0] / loss - 1) > LOSS_RELATIVE_ERROR:
            faults.append(f"loss at step {step} is {losses} instead of {loss}")
    return faults


def reshard(
    folder: Path, *, num_plans: int, seed: int, world_sizes: tuple[int, ...] = WORLD_SIZES
) -> list[Change]:
    """Save under all plans, then load all checkpoints under all plans."""
    for world_size in world_sizes:
        start(__file__, world_size, "save", str(folder), str(num_plans), str(seed))
    for world_size in world_sizes:
        start(__file__, world_size, "load", str(folder), str(num_plans), str(seed))
    return [
        Change(**{**fields, "faults": tuple(fields["faults"])})
        for world_size in world_sizes
        for fields in json.loads((folder / f"{world_size}.json").read_text())
    ]


def table(changes: list[Change]) -> str:
    """Return a Markdown table by optimizer and numbers of ranks."""
    columns = ("optimizer", "ranks", "changes", "converted pieces", "equal")
    rows = []
    by_case: dict[tuple[str, int, int], list[Change]] = {}
    for change in changes:
        by_case.setdefault((change.optimizer, change.was, change.now), []).append(change)
    for (optimizer, was, now), found in sorted(by_case.items()):
        good = sum(not change.faults for change in found)
        converted = sum(change.converted for change in found)
        rows.append((optimizer, f"{was} to {now}", len(found), converted, good))
    faults = [f"fault: {change}" for change in changes if change.faults]
    table = TextTable(columns, rows).markdown()
    return "\n".join([table, "", f"{len(changes)} changes", *faults])


def _new_run(folder: Path, *, num_ranks: int, sharder: str) -> TrainingRun:
    return TrainingRun(
        folder,
        *SMALL,
        *("cost_model=learned", f"sharder={sharder}", "optimizer=sgd", "resume=auto"),
        *("optimizer.embedding_learning_rate=0.01", "optimizer.dense_learning_rate=0.001"),
        *("batch_size=252", "trainer.checkpoint.every_steps=1000"),  # a multiple of 1, 2 and 3
        num_ranks=num_ranks,
    )


def _train_to(trained: TrainingRun, num_steps: int) -> None:
    """Start a run that ends with a checkpoint after so many steps."""
    trained.start(f"trainer.num_steps={num_steps}")
    try:
        if (code := trained.finish()) != 0:
            raise RuntimeError(f"the run ended with {code}: {trained.output()}")
    finally:
        trained.stop()


def _plans(world_size: int, num_plans: int, seed: int) -> list[ShardingPlan]:
    return [random_plan(world_size, seed + 1000 * number) for number in range(num_plans)]


def _main() -> None:
    part, folder, num_plans, seed = sys.argv[1:]
    warnings.filterwarnings("ignore", category=FutureWarning, message=".*deprecat")
    with process_group(timeout_s=300) as rank:
        plans = _plans(rank.world_size, int(num_plans), int(seed))
        (_save if part == "save" else _load)(rank, Path(folder), plans)


def _save(rank: Rank, folder: Path, plans: list[ShardingPlan]) -> None:
    for (number, plan), optimizer in itertools.product(enumerate(plans), OPTIMIZERS):
        state = _state(rank, plan, optimizer, is_trained=True)
        run_dir = folder / optimizer / f"{rank.world_size}_{number}"
        saver = Saver(run_dir, keep=1, background=False, rank=rank)
        saver.save(state.tensors, run_state(rank, plan, state))
        saver.close()
        if saver.failure is not None:
            raise RuntimeError(saver.failure)


def _load(rank: Rank, folder: Path, plans: list[ShardingPlan]) -> None:
    changes = []
    for plan, optimizer in itertools.product(plans, OPTIMIZERS):
        state = _state(rank, plan, optimizer, is_trained=False)
        for run_dir in sorted((folder / optimizer).iterdir()):
            manifest = read_manifest(checkpoints(run_dir)[0])
            check_parts(manifest)
            for logical in state.tensors.values():
                for piece in logical.pieces:
                    piece.tensor.fill_(-1)  # what is not loaded shows
            load_model(manifest, state)
            converted, faults = _compared(manifest, state)
            of_ranks: list[Any] = [None] * rank.world_size
            dist.all_gather_object(of_ranks, (converted, faults))
            changes.append(
                Change(
                    optimizer,
                    manifest.state.world_size,
                    rank.world_size,
                    sum(converted for converted, _ in of_ranks),
                    tuple(sorted({fault for _, faults in of_ranks for fault in faults})),
                )
            )
    if rank.is_zero:
        text = json.dumps([asdict(change) for change in changes])
        (folder / f"{rank.world_size}.json").write_text(text)


def _state(rank: Rank, plan: ShardingPlan, optimizer: str, *, is_trained: bool) -> ModelState:
    """Return the state of a model, or made-up state with a number for each weight."""
    if optimizer != "adam":
        built = sharded(rank, plan, optimizer)
        if is_trained:
            train(rank, built)
        return model_state(
            built.model, built.optimizer, plan, TABLES, embedding_optimizer=optimizer
        )
    fused = {}
    for made, number in itertools.product(TABLES, (1, 2)):
        shape = (made.num_embeddings, made.embedding_dim)
        whole = number * torch.arange(1.0, 1 + shape[0] * shape[1]).reshape(shape)
        fused[state_key(made.name, number)] = LogicalTensor(
            shape,
            torch.float32,
            tuple(
                Piece((shard.rows[0], shard.cols[0]), whole[slice(*shard.rows), slice(*shard.cols)])
                for shard in plan.shards
                if (shard.table, shard.rank) == (made.name, rank.rank)
            ),
        )
    return ModelState({}, {}, fused, {}, column_bounds(plan))


def _compared(manifest: Manifest, state: ModelState) -> tuple[int, list[str]]:
    """Return the number of converted pieces, and the names of wrong tensors."""
    num_converted = 0
    faults = []
    for name, logical in state.tensors.items():
        whole = load_whole(manifest, name)
        for piece in logical.pieces:
            if name in state.row_states:
                expected, is_converted = _row_state(manifest, state, name, whole, piece)
                num_converted += is_converted
            else:
                expected, is_converted = whole[_place(piece)], False
            error = (piece.tensor - expected).abs() / expected.abs().clamp(min=1e-30)
            if error.numel() and float(error.max()) > (RELATIVE_ERROR if is_converted else 0.0):
                faults.append(name)
    return num_converted, faults


def _row_state(
    manifest: Manifest, state: ModelState, name: str, whole: Tensor, piece: Piece
) -> tuple[Tensor, bool]:
    """Return what a piece of row-wise state should be, from the state of each column.

    A new shard has the mean over its columns; it is exactly the state of the one that it lies in.
    """
    table = name.removeprefix("tables.").rpartition(".")[0]
    written, wanted = manifest.state.column_bounds[table], state.column_bounds[table]
    by_column = torch.cat(
        [
            whole[:, i : i + 1].expand(-1, stop - start)
            for i, (start, stop) in enumerate(itertools.pairwise(written))
        ],
        dim=1,
    )
    rows = slice(piece.offsets[0], piece.offsets[0] + piece.tensor.shape[0])
    start, stop = wanted[piece.offsets[1]], wanted[piece.offsets[1] + 1]
    columns = by_column[rows, start:stop]
    if any(a <= start and stop <= b for a, b in itertools.pairwise(written)):
        return columns[:, :1], tuple(written) != tuple(wanted)
    return columns.double().mean(1, keepdim=True).float(), True


def _place(piece: Piece) -> tuple[slice, ...]:
    return tuple(
        slice(start, start + size)
        for start, size in zip(piece.offsets, piece.tensor.shape, strict=True)
    )


if __name__ == "__main__":
    _main()
