"""Lookups in tables of fp16 against those of fp32, in FBGEMM on one thread of this CPU."""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import Tensor

SHAPES = (
    (1_000, 64, 4, 1024, 10),
    (100_000, 32, 4, 1024, 10),
    (100_000, 128, 4, 1024, 10),
    (1_000_000, 64, 2, 2048, 10),
    (1_000_000, 128, 2, 2048, 10),
    (1_000_000, 16, 4, 2048, 4),
)
"""Rows and columns of a table, number of tables, samples, and ids of a sample in a table."""

PRECISIONS = (SparseType.FP32, SparseType.FP16)
WARMUP = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=9)


def run(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    ratios = [_measured(shape, options.rounds) for shape in SHAPES]
    for direction, of_all in zip(("forward", "backward"), zip(*ratios, strict=True), strict=True):
        print(f"{direction}: median of the shapes {statistics.median(of_all):.2f}")


def _measured(shape: tuple[int, int, int, int, int], rounds: int) -> tuple[float, float]:
    """Return the median ratios of times in fp16 to those in fp32, forward and backward."""
    rows, cols, num_tables, num_samples, pooling = shape
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, rows, (num_tables * num_samples * pooling,), generator=generator)
    offsets = torch.arange(0, len(ids) + 1, pooling)
    lookups = {precision: _lookup(rows, cols, num_tables, precision) for precision in PRECISIONS}
    ratios = []
    for i in range(WARMUP + rounds):
        # each precision is first in turn, so that none gains from the order
        order = PRECISIONS if i % 2 else PRECISIONS[::-1]
        times = {precision: _time_s(lookups[precision], ids, offsets) for precision in order}
        exact, half = (times[precision] for precision in PRECISIONS)
        ratios.append((half[0] / exact[0], half[1] / exact[1]))
    forward, backward = (statistics.median(of_one) for of_one in zip(*ratios[WARMUP:], strict=True))
    print(
        f"{num_tables} tables of {rows:,} x {cols}, {num_samples} samples of {pooling} ids: "
        f"fp16 takes {forward:.2f} x forward, {backward:.2f} x backward",
        flush=True,
    )
    return forward, backward


def _lookup(
    rows: int, cols: int, num_tables: int, precision: SparseType
) -> SplitTableBatchedEmbeddingBagsCodegen:
    table = (rows, cols, EmbeddingLocation.HOST, ComputeDevice.CPU)
    lookup = SplitTableBatchedEmbeddingBagsCodegen(
        [table] * num_tables,
        optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        weights_precision=precision,
        output_dtype=SparseType.FP32,
        learning_rate=0.05,
    )
    for weights in lookup.split_embedding_weights():
        weights.uniform_(-0.1, 0.1)
    return lookup


def _time_s(
    lookup: SplitTableBatchedEmbeddingBagsCodegen, ids: Tensor, offsets: Tensor
) -> tuple[float, float]:
    """Return the times of a lookup and of the update of its rows."""
    started = time.perf_counter()
    pooled = lookup(ids, offsets)
    forward_s = time.perf_counter() - started
    gradients = 1e-3 * torch.randn_like(pooled)
    started = time.perf_counter()
    pooled.backward(gradients)
    return forward_s, time.perf_counter() - started
