"""A model goes on from its checkpoint under any plan and number of ranks."""

import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from dlrm_sharded.checkpoint.folder import checkpoints
from dlrm_sharded.checkpoint.logical import LogicalTensor, Piece
from dlrm_sharded.checkpoint.manifest import Manifest, check_parts, read_manifest
from dlrm_sharded.checkpoint.model_state import ModelState, model_state
from dlrm_sharded.checkpoint.restore import load_model, load_weights, load_whole
from dlrm_sharded.files.errors import CheckpointError, DivergenceError
from dlrm_sharded.ranks.distributed import Rank
from dlrm_sharded.training.progress import Progress
from tests.distributed.small_model import (
    PLANS,
    TABLES,
    A,
    C,
    make_plan,
    make_sharded,
    tables_of,
    trained_logits,
)
from tests.preloaded.ranks import gathered, run_ranks
from tests.unit.checkpoint.cases import checkpoints_of_run, write

HALF = (A, C)
"""Tables in fp16, beside one in fp32."""

NUM_STEPS = 2000
"""Steps of a training that has 20 s to find that it has diverged."""


def built(
    rank: Rank, kind: str, embedding: str, half: tuple[str, ...] = ()
) -> tuple[Any, Any, ModelState]:
    """The model under a plan with the named tables in fp16, its optimizers and its state."""
    sharded, optimizer = make_sharded(rank, kind, embedding, half=half)
    plan = make_plan(kind, rank.world_size, half)
    state = model_state(sharded, optimizer, plan, tables_of(plan), embedding_optimizer=embedding)
    return sharded, optimizer, state


def save(rank: Rank, state: ModelState, folder: Path) -> None:
    said = {"column_bounds": state.column_bounds, "buffers": state.buffers}
    write(folder, rank, state=state.tensors, background=True, **said)


def newest(folder: Path) -> Manifest:
    manifest = read_manifest(checkpoints(folder)[0])
    check_parts(manifest)
    return manifest


def save_trained(rank: Rank, kind: str, embedding: str, folder: str, half: tuple[str, ...]) -> None:
    sharded, optimizer, state = built(rank, kind, embedding, half)
    trained_logits(rank, sharded, optimizer)
    save(rank, state, Path(folder))


def load_into(rank: Rank, kinds: list[str], embedding: str, folder: str) -> None:
    """Load a checkpoint under several plans, in fp32; save each again, under its name."""
    manifest = newest(Path(folder))
    for kind in kinds:
        _, _, state = built(rank, kind, embedding)
        for logical in state.tensors.values():
            for piece in logical.pieces:
                piece.tensor.fill_(-1)  # what is not loaded shows
        load_model(manifest, state)
        save(rank, state, Path(folder) / kind)


def check_equal(before: Manifest, after: Manifest) -> None:
    """Check that each tensor was loaded under another plan, and written again, without a change.

    Row states of other columns keep their sum over the columns of a table.
    """
    assert before.tensors.keys() == after.tensors.keys()
    for name in before.tensors:
        loaded = load_whole(after, name)
        table = name.removeprefix("tables.").rpartition(".")[0]
        if name.startswith("tables.") and "momentum" in name:
            written, wanted = before.state.column_bounds[table], after.state.column_bounds[table]
            is_by_row = before.tensors[name].shape[1] == len(written) - 1
            if is_by_row and written != wanted:
                sums = [
                    state.double() @ torch.tensor(bounds).diff().double()
                    for state, bounds in ((load_whole(before, name), written), (loaded, wanted))
                ]
                torch.testing.assert_close(*sums, rtol=1e-6, atol=0)
                continue
        assert loaded.dtype in (torch.float32, torch.int64), name
        assert torch.equal(load_whole(before, name).to(loaded.dtype), loaded), name


@pytest.mark.parametrize(
    ("embedding", "first", "sizes", "half"),
    [
        ("rowwise_adagrad", "columns_uneven", (2, 3), HALF),
        ("sgd", "row_wise", (3, 2), ()),
        ("rowwise_adagrad", "replicas", (3, 2), ()),
        ("elementwise_adagrad", "replicas_and_others", (2, 1), ()),
    ],
)
def test_loads_under_every_plan(embedding, first, sizes, half, tmp_path):
    """Weights and optimizer state are identical; row-wise state of other columns is converted."""
    run_ranks(save_trained, sizes[0], first, embedding, str(tmp_path), half)
    run_ranks(load_into, sizes[1], list(PLANS), embedding, str(tmp_path))
    before = newest(tmp_path)
    for table in TABLES:
        written = before.tensors[f"tables.{table.name}.weight"].dtype
        assert written == ("float16" if table.name in half else "float32")
    assert any(float(load_whole(before, f"tables.{t.name}.weight").abs().max()) for t in TABLES)
    for kind in PLANS:
        check_equal(before, newest(tmp_path / kind))


OTHER_STATES = [
    ("sgd", "rowwise_adagrad"),
    ("rowwise_adagrad", "sgd"),
    ("rowwise_adagrad", "elementwise_adagrad"),
    ("elementwise_adagrad", "rowwise_adagrad"),
]


def errors_of_loading(rank: Rank, folder: str) -> list[str]:
    """Messages for checkpoints under optimizers whose state is another one."""
    messages = []
    for saved, loaded in OTHER_STATES:
        _, _, state = built(rank, "table_wise", saved)
        save(rank, state, Path(folder) / saved)
        _, _, other = built(rank, "table_wise", loaded)
        load_weights(newest(Path(folder) / saved), other)
        try:
            load_model(newest(Path(folder) / saved), other)
        except CheckpointError as error:
            messages.append(str(error))
    return messages


def test_nothing_is_silently_not_loaded(tmp_path):
    lacks, has, *others = run_ranks(errors_of_loading, 2, str(tmp_path))
    first, second, third = sorted(f"tables.{table.name}.momentum1" for table in TABLES)
    assert f"lacks 3 tensors: {first}, {second}, {third}" in lacks
    assert f"has, but the model lacks, 3 tensors: {first}" in has
    a = f"tables.{TABLES[0].name}.momentum1"
    assert f"{a} is float32 [46, 1], the model's is float32 [46, 16]" in others[0]
    assert f"{a} is [46, 16] for column shards at [0, 16]" in others[1]


def state_with_a_mask(rank: Rank, folder: str) -> list[tuple[str, ...]]:
    """Save a model with an infinite buffer, as a mask may be; the names of its buffers."""
    sharded, optimizer = make_sharded(rank, "table_wise", "sgd")
    sharded.module.register_buffer("mask", torch.tensor([0.0, -math.inf]))
    plan = make_plan("table_wise", rank.world_size)
    state = model_state(sharded, optimizer, plan, TABLES, embedding_optimizer="sgd")
    save(rank, state, Path(folder))
    return gathered(rank, state.buffers)


def test_a_mask_is_no_divergence(tmp_path):
    assert run_ranks(state_with_a_mask, 2, str(tmp_path)) == [("dense.mask",)] * 2
    assert load_whole(newest(tmp_path), "dense.mask").tolist() == [0.0, -math.inf]


def diverge(rank: Rank, folder: str, background: bool) -> list[list[Any]]:
    """Train on after a checkpoint in which one value of the last rank alone is not finite.

    Return of every rank its error, whether it came before the last step, and all checkpoints.
    """
    table = torch.zeros(rank.world_size, 4)
    mine = table[rank.rank : rank.rank + 1]
    logical = LogicalTensor((rank.world_size, 4), torch.float32, (Piece((rank.rank, 0), mine),))
    state = {"tables.t.weight": logical}
    saved = checkpoints_of_run(
        Path(folder), rank, state, in_background=background, every_steps=5, keep=1
    )
    error = None
    try:
        with saved:
            for step in range(1, NUM_STEPS):
                if step == 10 and rank.rank == rank.world_size - 1:
                    mine[0, 1] = float("inf")
                # Steps after the tenth write nothing: the ranks must inform each other.
                saved.after_step(
                    step if step <= 10 else 11,
                    is_complete=False,
                    progress=lambda step=step: Progress(step=step),
                )
                time.sleep(0.01)
    except DivergenceError as raised:
        error = str(raised)
    return gathered(
        rank, [error, step < NUM_STEPS - 1, [path.name for path in checkpoints(Path(folder))]]
    )


@pytest.mark.parametrize("background", [True, False], ids=["background", "foreground"])
def test_what_one_rank_finds_ends_all(background, tmp_path):
    ends = run_ranks(diverge, 2, str(tmp_path), background)
    (error, is_early, left), other = ends
    assert is_early
    assert error.startswith("1 of 4 values of tables.t.weight are not finite after step 10, so no")
    assert left == ["step-0000000005"]
    assert other == [error, is_early, left]
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == left
