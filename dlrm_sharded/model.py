"""DLRM and DLRM-DCNv2, built from TorchRec's parts for tables of different dims, and sharded.

All tables live in one `EmbeddingBagCollection`, so that a rank's lookups fuse into one kernel
whatever their dims. Dense interactions need one dim for all features: tables of another dim pass
through a linear projection that all tables of that dim share (mixed-dimension embeddings,
arXiv:1909.11810, sec. 3; differs: one projection per dim instead of one per table, which keeps the
projections a few batched matrix products). Separate collections per dim would need no projection
matrix but one fused lookup and one all-to-all each. With equal dims there is no projection and the
model computes what `torchrec.models.dlrm` computes.

Letters: B batch, F tables, D interaction dim.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec.datasets.utils import Batch
from torchrec.distributed.embeddingbag import (
    EmbeddingBagCollectionSharder,
    ShardedEmbeddingBagCollection,
)
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardingPlan as TorchRecPlan
from torchrec.models.dlrm import DenseArch, InteractionArch, InteractionDCNArch, OverArch, choose
from torchrec.modules.crossnet import LowRankCrossNet
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_sharded.errors import ConfigError, check_count
from dlrm_sharded.plan import ShardingPlan
from dlrm_sharded.tables import COLUMN_MULTIPLE, Table
from dlrm_sharded.task import Topology
from dlrm_sharded.torchrec_adapter import bag_configs, to_torchrec

log = logging.getLogger(__name__)

INIT_BLOCK_ROWS = 65_536
"""Rows of a table whose initial weights share one seed."""

BF16_UNITS = ("avx512_bf16", "amx_bf16", "bf16", "sve_bf16")
"""CPU capabilities that multiply bfloat16 numbers, as torch names them: two of x86, two of ARM."""


class SparseArch(nn.Module):
    """Looks all tables up in one collection and projects their vectors to one dim.

    Args:
        interaction_dim: D.
    """

    def __init__(
        self, tables: Sequence[Table], interaction_dim: int, *, device: torch.device
    ) -> None:
        super().__init__()
        self.embedding_bag_collection = EmbeddingBagCollection(
            tables=bag_configs(tables), device=torch.device("meta")
        )
        self.interaction_dim = interaction_dim
        self.features_of_dim: dict[int, list[str]] = {}
        for table in tables:
            self.features_of_dim.setdefault(table.embedding_dim, []).append(table.name)
        self.projections = nn.ModuleDict(
            {
                str(dim): nn.Linear(dim, interaction_dim, bias=False, device=device)
                for dim in self.features_of_dim
                if dim != interaction_dim
            }
        )

    def lookup(self, features: KeyedJaggedTensor) -> dict[str, Tensor]:
        """Return pooled vectors [B, dim of the table] by table name."""
        return cast(dict[str, Tensor], self.embedding_bag_collection(features).to_dict())

    def project(self, pooled: dict[str, Tensor]) -> Tensor:
        """Return [B, F, D], the tables grouped by dim, in the model's order within a group."""
        groups = []
        for dim, names in self.features_of_dim.items():
            group = torch.cat([pooled[name] for name in names], dim=1)
            group = group.reshape(-1, len(names), dim)
            if dim != self.interaction_dim:
                group = self.projections[str(dim)](group)
            groups.append(group)
        return groups[0] if len(groups) == 1 else torch.cat(groups, dim=1)


class Dlrm(nn.Module):
    """DLRM (arXiv:1906.00091) with any of TorchRec's interactions, and its loss.

    Args:
        interaction: takes dense [B, D] and sparse [B, F, D] features, gives [B, over_in_features].
        bf16: whether to autocast all but the embedding lookups to bfloat16.
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
        bf16: bool,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.sparse_arch = SparseArch(tables, dense_layers[-1], device=device)
        self.dense_arch = DenseArch(num_dense, list(dense_layers), device=device)
        self.inter_arch = interaction.to(device)
        self.over_arch = OverArch(over_in_features, list(over_layers), device=device)
        self.loss_fn = nn.BCEWithLogitsLoss()
        self._device_type = device.type
        self.bf16 = bf16

    def forward(self, batch: Batch) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        """Return the mean loss [], and detached (loss [], logits [B], labels [B])."""
        pooled = self.sparse_arch.lookup(batch.sparse_features)
        with torch.autocast(self._device_type, torch.bfloat16, enabled=self.bf16):
            embedded = self.dense_arch(batch.dense_features)
            crossed = self.inter_arch(embedded, self.sparse_arch.project(pooled).to(embedded.dtype))
            logits = self.over_arch(crossed).squeeze(-1)
        logits = logits.float()
        loss = self.loss_fn(logits, batch.labels)
        return loss, (loss.detach(), logits.detach(), batch.labels)


def dlrm(
    tables: Sequence[Table],
    num_dense: int,
    *,
    dense_layers: Sequence[int],
    over_layers: Sequence[int],
    device: torch.device,
    bf16: bool = False,
) -> Dlrm:
    """Build a DLRM with dot interaction; the last of `dense_layers` is D."""
    _check_layers(dense_layers, over_layers)
    num_tables, dim = len(tables), dense_layers[-1]
    return Dlrm(
        tables,
        num_dense,
        dense_layers=dense_layers,
        over_layers=over_layers,
        interaction=InteractionArch(num_sparse_features=num_tables),
        over_in_features=dim + choose(num_tables, 2) + num_tables,
        bf16=bf16,
        device=device,
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
    bf16: bool = False,
) -> Dlrm:
    """Build a DLRM with DCNv2's low-rank cross network (arXiv:2008.13535), as MLPerf trains it."""
    _check_layers(dense_layers, over_layers)
    check_count("model.num_cross_layers", num_cross_layers, least=1)
    check_count("model.cross_rank", cross_rank, least=1)
    width = (len(tables) + 1) * dense_layers[-1]
    return Dlrm(
        tables,
        num_dense,
        dense_layers=dense_layers,
        over_layers=over_layers,
        interaction=InteractionDCNArch(
            num_sparse_features=len(tables),
            crossnet=LowRankCrossNet(
                in_features=width, num_layers=num_cross_layers, low_rank=cross_rank
            ),
        ),
        over_in_features=width,
        bf16=bf16,
        device=device,
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


def shard_model(
    model: Dlrm, plan: ShardingPlan, tables: Sequence[Table], topology: Topology, *, seed: int
) -> DistributedModelParallel:
    """Shard the model by a plan, in TorchRec's DistributedModelParallel.

    The seed alone decides the initial weights, so runs under different plans start from one model.
    """
    device = next(model.dense_arch.parameters()).device
    wrapped = DistributedModelParallel(
        module=model,
        device=device,
        plan=TorchRecPlan(
            {"sparse_arch.embedding_bag_collection": to_torchrec(plan, tables, topology)}
        ),
        sharders=[EmbeddingBagCollectionSharder()],
    )
    initialize_tables(wrapped, seed)
    return wrapped


def sharded_embeddings(model: nn.Module) -> ShardedEmbeddingBagCollection:
    """Return the sharded collection within a wrapped model."""
    return next(m for m in model.modules() if isinstance(m, ShardedEmbeddingBagCollection))


def initialize_tables(model: nn.Module, seed: int) -> None:
    """Fill all tables with uniform numbers in +-sqrt(1 / rows), as TorchRec does by default."""
    for name, weight in sharded_embeddings(model).state_dict().items():
        table = name.split(".")[-2]
        assert isinstance(weight, ShardedTensor), f"{name} is a {type(weight).__name__}"
        for shard in weight.local_shards():
            fill_table(shard.tensor, shard.metadata.shard_offsets, weight.size(0), table, seed)


def fill_table(
    shard: Tensor, offsets: Sequence[int], num_embeddings: int, table: str, seed: int
) -> None:
    """Fill the rectangle of a table that begins at `offsets` = (row, column).

    Every block of 65,536 rows x 4 columns has its own seed. So a weight depends on its place in its
    table alone, and a rank draws little more than the weights that it holds.
    """
    bound = num_embeddings**-0.5
    generator = torch.Generator(device=shard.device)
    first_row, first_col = offsets
    end_row = first_row + shard.shape[0]
    for start in range(first_row - first_row % INIT_BLOCK_ROWS, end_row, INIT_BLOCK_ROWS):
        rows = min(INIT_BLOCK_ROWS, num_embeddings - start)
        in_block = slice(max(first_row, start) - start, min(end_row, start + rows) - start)
        into = slice(start + in_block.start - first_row, start + in_block.stop - first_row)
        for col in range(0, shard.shape[1], COLUMN_MULTIPLE):
            place = f"{seed}/{table}/{start}/{first_col + col}"
            generator.manual_seed(zlib.crc32(place.encode()))
            block = torch.empty(rows, COLUMN_MULTIPLE, device=shard.device)
            block.uniform_(-bound, bound, generator=generator)
            shard[into, col : col + COLUMN_MULTIPLE].copy_(block[in_block])


def _check_layers(dense_layers: Sequence[int], over_layers: Sequence[int]) -> None:
    for key, sizes, least in (("dense_layers", dense_layers, 1), ("over_layers", over_layers, 2)):
        if isinstance(sizes, str | int) or len(sizes) < least:
            raise ConfigError(f"model.{key} is {sizes!r}, must be a list of {least} sizes or more")
        for size in sizes:
            check_count(f"a size in model.{key}", size, least=1)
    if over_layers[-1] != 1:
        raise ConfigError(f"model.over_layers is {list(over_layers)}; the last size must be 1")


def embedding_parameters(model: Dlrm) -> list[nn.Parameter]:
    """Return the weights of the tables, which the fused optimizer trains."""
    return list(model.sparse_arch.embedding_bag_collection.parameters())
