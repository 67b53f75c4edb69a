"""The fused FBGEMM lookups of a sharded model, and the steps that they count."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torchrec.distributed.batched_embedding_kernel import (
    BatchedFusedEmbedding,
    BatchedFusedEmbeddingBag,
)

from dlrm_sharded.model.replicas import ShardedTables


def fused_lookups(model: nn.Module) -> Iterator[BatchedFusedEmbeddingBag | BatchedFusedEmbedding]:
    """Yield this rank's fused lookups of bags and of sequences."""
    for embeddings in model.modules():
        if isinstance(embeddings, ShardedTables):
            for lookup in embeddings._lookups:  # a plain list: `modules()` misses them
                for module in lookup.modules():
                    if isinstance(module, BatchedFusedEmbeddingBag | BatchedFusedEmbedding):
                        yield module


def set_fused_steps(model: nn.Module, step: int) -> None:
    """Set FBGEMM's step counts, which Adam uses for its bias correction."""
    for kernel in fused_lookups(model):
        kernel.emb_module.iter.fill_(step)
        kernel.emb_module.iter_cpu.fill_(step)


@contextmanager
def fused_steps_kept(model: nn.Module) -> Iterator[None]:
    """Restore FBGEMM's step counts at the end of the block; it counts all lookups as steps."""
    fused = [kernel.emb_module for kernel in fused_lookups(model)]
    steps = [(module.iter.clone(), module.iter_cpu.clone()) for module in fused]
    try:
        yield
    finally:
        for module, (step, step_cpu) in zip(fused, steps, strict=True):
            module.iter.copy_(step)
            module.iter_cpu.copy_(step_cpu)
