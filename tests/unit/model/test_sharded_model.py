"""Table weights depend on their place alone; exchanges have a precision."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from dlrm_sharded.model import sharded_model
from dlrm_sharded.model.sharded_model import exchange_codecs, fill_table
from dlrm_sharded.plans.precision import FP32_EXCHANGE, ExchangePrecision


def filled(rows: tuple[int, int], cols: tuple[int, int], num_rows: int, **changes: Any) -> Tensor:
    shard = torch.full((rows[1] - rows[0], cols[1] - cols[0]), float("nan"))
    arguments = {"table": "t", "seed": 3, **changes}
    fill_table(shard, [rows[0], cols[0]], num_rows, **arguments)
    return shard


@pytest.mark.parametrize(
    ("num_rows", "block_rows", "row_cuts"),
    [
        (70_000, 65_536, [35_000]),
        (70_000, 65_536, [65_536]),
        (50, 16, [1, 15, 16, 17, 40]),
        (50, 64, [25]),
        (48, 16, [32]),
    ],
    ids=["half", "at_block_end", "many", "one_block", "even_blocks"],
)
def test_pieces_are_the_whole(num_rows, block_rows, row_cuts, monkeypatch):
    monkeypatch.setattr(sharded_model, "INIT_BLOCK_ROWS", block_rows)
    whole = filled((0, num_rows), (0, 8), num_rows)
    bounds = [0, *row_cuts, num_rows]
    rows = [filled(part, (0, 8), num_rows) for part in itertools.pairwise(bounds)]
    assert torch.equal(torch.cat(rows), whole)
    cols = [filled((0, num_rows), part, num_rows) for part in ((0, 4), (4, 8))]
    assert torch.equal(torch.cat(cols, dim=1), whole)


def test_weights_are_uniform_and_all_different():
    whole = filled((0, 70_000), (0, 8), 70_000)
    bound = 70_000**-0.5
    assert whole.abs().max() <= bound
    assert whole.std() == pytest.approx(bound / 3**0.5, rel=0.01)
    first_rows = [whole[start, :4] for start in (0, 65_536)] + [whole[0, 4:]]
    others = [filled((0, 70_000), (0, 4), 70_000, **c)[0] for c in ({"seed": 4}, {"table": "u"})]
    assert len({tuple(row.tolist()) for row in [*first_rows, *others]}) == 5


@pytest.mark.parametrize("collective", ["ALL_TO_ALL", "REDUCE_SCATTER"])
def test_small_gradients_survive_fp16(collective):
    """They are below the normal numbers of fp16, which have 11 bits."""
    codecs = exchange_codecs(ExchangePrecision("fp16", "fp16"))
    codec = codecs[f"POOLED_EMBEDDINGS_{collective}"].backward
    gradients = 1e-6 * torch.linspace(0.1, 1.0, 64)
    encoded = codec.encode(gradients, codec.create_context())
    assert encoded.dtype == codec.quantized_dtype == torch.float16
    torch.testing.assert_close(codec.decode(encoded), gradients, rtol=2**-10, atol=0.0)


def test_fp32_needs_no_codecs():
    assert exchange_codecs(FP32_EXCHANGE) is None
