"""DLRM and DLRM-DCNv2, built from TorchRec's parts for tables of different dims.

All tables live in one `EmbeddingBagCollection`, so that a rank's lookups fuse into one kernel
whatever their dims. Dense interactions need one dim for all features: tables of another dim pass
through a linear projection that all tables of that dim share (mixed-dimension embeddings,
arXiv:1909.11810, sec. 3; differs: one projection per dim instead of one per table, which keeps the
projections a few batched matrix products). Separate collections per dim would need no projection
matrix but one fused lookup and one all-to-all each. With equal dims there is no projection and the
model computes what `torchrec.models.dlrm` computes.

Letters: B batch, F features, D interaction dim.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.profiler import record_function
from torchrec.datasets.utils import Batch
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from dlrm_sharded.files.errors import ConfigError, check_count, check_flag
from dlrm_sharded.model.compiled import (
    MODES_WITH_GRAPHS,
    NOT_COMPILED,
    check_compile_mode,
    compile_layers,
)
from dlrm_sharded.model.dense_graph import DenseGraph
from dlrm_sharded.model.dense_layers import DenseLayers, OverLayers
from dlrm_sharded.model.interaction import CrossInteraction, DotInteraction
from dlrm_sharded.model.torchrec_adapter import bag_configs, in_aligned_order
from dlrm_sharded.model.vector_stack import VectorStack
from dlrm_sharded.plans.tables import Table, tables_by_feature

log = logging.getLogger(__name__)

TRIED_DEVICES = ("cuda",)
"""Types of devices on which the times of the first steps decide how the others run."""

BF16_UNITS = ("avx512_bf16", "amx_bf16", "bf16", "sve_bf16")
"""CPU capabilities that multiply bfloat16 numbers, as torch names them: two of x86, two of ARM."""


class SparseArch(nn.Module):
    """Looks up all tables in one collection, which may hold them in another order."""

    def __init__(self, tables: Sequence[Table]) -> None:
        super().__init__()
        self.embedding_bag_collection = EmbeddingBagCollection(
            tables=bag_configs(in_aligned_order(tables)), device=torch.device("meta")
        )

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Begin the lookup; the first use of the result waits for the exchange between ranks."""
        return cast(KeyedTensor, self.embedding_bag_collection(features))


class Dlrm(nn.Module):
    """DLRM (arXiv:1906.00091) with an interaction of `interaction.py`, and its loss.

    Args:
        interaction: takes the vectors [B, 1 + F, D] of all features, gives [B, over_in_features].
        bf16: whether to autocast all but the embedding lookups to bfloat16.
        compile_mode: one of `compiled.COMPILE_MODES`. On CUDA, None is decided later, see
            `sharded_model.set_dense_part`; on a CPU, None means "none".
        dense_graph: whether to train all but the embedding lookups by a `DenseGraph`. On CUDA, None
            is decided later, and until then nothing is recorded; on a CPU, None means False.

    Raises:
        ConfigError: an option has a wrong value, or two of them exclude each other.
    """

    def __init__(
        self,
        tables: Sequence[Table],
        num_dense: int,
        *,
        dense_layers: Sequence[int],
        over_layers: Sequence[int],
        interaction: nn.Module,
        over_in_features: int,
        device: torch.device,
        bf16: bool = False,
        compile_mode: str | None = NOT_COMPILED,
        dense_graph: bool | None = False,
    ) -> None:
        super().__init__()
        check_flag("model.bf16", bf16)
        if dense_graph is not None:
            check_flag("model.dense_graph", dense_graph)
        check_compile_mode(compile_mode, in_graph=bool(dense_graph))
        if device.type not in TRIED_DEVICES:
            compile_mode, dense_graph = compile_mode or NOT_COMPILED, bool(dense_graph)
        self.compile_mode, self.has_graph = compile_mode, dense_graph
        self.sparse_arch = SparseArch(tables)
        self.vector_stack = VectorStack(tables, dense_layers[-1], device=device)
        self.dense_arch = DenseLayers(num_dense, list(dense_layers), device=device)
        self.inter_arch = interaction.to(device)
        self.over_arch = OverLayers(over_in_features, list(over_layers), device=device)
        self.loss_fn = nn.BCEWithLogitsLoss()
        self.autocast_device = device.type
        self.bf16 = bf16
        self.has_graphs = bool(dense_graph) or compile_mode in MODES_WITH_GRAPHS
        compile_layers(self.compiled_layers(), compile_mode)
        self.dense_graph: DenseGraph | None = None
        if dense_graph is not False:
            self.dense_graph = DenseGraph(
                self._dense, self.dense_weights(), device, records=bool(dense_graph)
            )

    def forward(self, batch: Batch) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        """Return the mean loss [], and detached (loss [], logits [B], labels [B])."""
        pooled = self.sparse_arch(batch.sparse_features)
        dense = self.dense_graph if self.dense_graph and self.training else self._dense
        with record_function("dense_forward"):
            loss, logits = dense(batch.dense_features, pooled, batch.labels)
        return loss, (loss.detach(), logits.detach(), batch.labels)

    def _dense(
        self, features: Tensor, pooled: KeyedTensor, labels: Tensor
    ) -> tuple[Tensor, Tensor]:
        with torch.autocast(self.autocast_device, torch.bfloat16, enabled=self.bf16):
            # Meanwhile, the ranks exchange pooled vectors, or in the backward pass gradients.
            embedded = self.dense_arch(features)
            vectors = self.vector_stack(embedded, pooled)
            logits = self.over_arch(self.inter_arch(vectors)).squeeze(-1)
        logits = logits.float()
        return self.loss_fn(logits, labels), logits

    def compiled_layers(self) -> tuple[nn.Module, ...]:
        """Return the layers that `compile_mode` compiles."""
        return self.dense_arch, self.inter_arch, self.over_arch

    def dense_weights(self) -> list[nn.Parameter]:
        """Return all weights except the tables."""
        parts = self.vector_stack, self.dense_arch, self.inter_arch, self.over_arch
        return [weight for part in parts for weight in part.parameters()]


def dlrm(
    tables: Sequence[Table],
    num_dense: int,
    *,
    dense_layers: Sequence[int],
    over_layers: Sequence[int],
    device: torch.device,
    **options: Any,
) -> Dlrm:
    """Build a DLRM with dot interaction; the last of `dense_layers` is D.

    Args:
        options: `bf16`, `compile_mode` and `dense_graph` of `Dlrm`.
    """
    _check_layers(dense_layers, over_layers)
    interaction = DotInteraction(1 + len(tables_by_feature(tables)), device=device)
    return Dlrm(
        tables,
        num_dense,
        dense_layers=dense_layers,
        over_layers=over_layers,
        interaction=interaction,
        over_in_features=dense_layers[-1] + interaction.num_pairs,
        device=device,
        **options,
    )


def dlrm_dcnv2(
    tables: Sequence[Table],
    num_dense: int,
    *,
    dense_layers: Sequence[int],
    over_layers: Sequence[int],
    num_cross_layers: int,
    cross_rank: int,
    device: torch.device,
    **options: Any,
) -> Dlrm:
    """Build a DLRM with DCNv2's low-rank cross network (arXiv:2008.13535), as MLPerf trains it.

    Args:
        options: `bf16`, `compile_mode` and `dense_graph` of `Dlrm`.
    """
    _check_layers(dense_layers, over_layers)
    check_count("model.num_cross_layers", num_cross_layers, least=1)
    check_count("model.cross_rank", cross_rank, least=1)
    num_vectors, dim = 1 + len(tables_by_feature(tables)), dense_layers[-1]
    return Dlrm(
        tables,
        num_dense,
        dense_layers=dense_layers,
        over_layers=over_layers,
        interaction=CrossInteraction(
            num_vectors, dim, num_layers=num_cross_layers, rank=cross_rank
        ),
        over_in_features=num_vectors * dim,
        device=device,
        **options,
    )


def warn_of_slow_bf16(model: Dlrm, device: torch.device) -> None:
    """Log a warning if the model uses bfloat16 on a CPU that can only emulate it."""
    capabilities = torch.cpu.get_capabilities()
    if model.bf16 and device.type == "cpu" and not any(map(capabilities.get, BF16_UNITS)):
        log.warning(
            "model.bf16 is true, but this CPU has no bfloat16 instructions (%s): the dense part "
            "may train several times slower than with model.bf16=false",
            ", ".join(BF16_UNITS),
        )


def _check_layers(dense_layers: Sequence[int], over_layers: Sequence[int]) -> None:
    for key, sizes, least in (("dense_layers", dense_layers, 1), ("over_layers", over_layers, 2)):
        is_list = isinstance(sizes, Sequence) and not isinstance(sizes, str)
        if not is_list or len(sizes) < least:
            raise ConfigError(
                f"model.{key} is {sizes!r}; it must be a list of {least} sizes or more"
            )
        for size in sizes:
            check_count(f"a size in model.{key}", size, least=1)
    if over_layers[-1] != 1:
        raise ConfigError(f"model.over_layers is {list(over_layers)}; the last size must be 1")


def embedding_parameters(model: Dlrm) -> list[nn.Parameter]:
    """Return the weights of the tables, which the fused optimizer trains."""
    return list(model.sparse_arch.embedding_bag_collection.parameters())
