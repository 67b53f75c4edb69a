"""The model sharded by a plan, and the initial weights of its tables."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.embeddingbag import (
    EmbeddingBagCollectionSharder,
    ShardedEmbeddingBagCollection,
)
from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs
from torchrec.distributed.model_parallel import DefaultDataParallelWrapper, DistributedModelParallel
from torchrec.distributed.types import CommOp, QuantizedCommCodecs, ShardingEnv
from torchrec.distributed.types import ShardingPlan as TorchRecPlan

from dlrm_sharded.model.compiled import NOT_COMPILED, compile_layers
from dlrm_sharded.model.dlrm import Dlrm
from dlrm_sharded.model.fixed_lengths import FixedLengthSharder
from dlrm_sharded.model.torchrec_adapter import sharding_env, table_name, to_torchrec
from dlrm_sharded.plans.plan import ShardingPlan
from dlrm_sharded.plans.precision import QUANTIZED_ROW, ExchangePrecision
from dlrm_sharded.plans.tables import COLUMN_MULTIPLE, Table
from dlrm_sharded.plans.task import Topology
from dlrm_sharded.ranks.distributed import new_group

INIT_BLOCK_ROWS = 65_536
"""Rows of a table whose initial weights share one seed."""

EMBEDDINGS = "sparse_arch.embedding_bag_collection"
"""Path of the embedding collection in a model."""

FP16_LOSS_SCALE = 1024.0
"""Factor by which gradients are scaled for exchanges in fp16, whose smallest number is 6e-8."""


def shard_model(
    model: Dlrm,
    plan: ShardingPlan,
    tables: Sequence[Table],
    topology: Topology,
    *,
    seed: int,
    ids_per_sample: Mapping[str, int] | None = None,
) -> DistributedModelParallel:
    """Shard the model by a plan, in TorchRec's DistributedModelParallel; a collective of all ranks.

    Initial weights depend only on the seed, so runs under different plans start from the same
    model.

    Args:
        ids_per_sample: number of ids of each feature in every sample; None if it varies.
    """
    device = next(model.dense_arch.parameters()).device
    codecs = exchange_codecs(plan.exchange_precision)
    sharder = EmbeddingBagCollectionSharder(qcomm_codecs_registry=codecs)
    if ids_per_sample is not None:
        sharder = FixedLengthSharder(ids_per_sample, qcomm_codecs_registry=codecs)
    is_alone = topology.world_size == 1
    module_plan = to_torchrec(plan, tables, topology)
    wrapped = DistributedModelParallel(
        module=model,
        env=sharding_env(None if is_alone else new_group()),
        device=device,
        plan=TorchRecPlan({EMBEDDINGS: module_plan}),
        sharders=[sharder],
        init_data_parallel=not is_alone,
        data_parallel_wrapper=_DenseInOwnGroup(),
    )
    initialize_tables(wrapped, seed)
    return wrapped


def dry_shard_model(
    model: Dlrm, plan: ShardingPlan, tables: Sequence[Table], topology: Topology
) -> DistributedModelParallel:
    """Shard a model on the meta device as `shard_model` does, but without memory for tensors.

    The result has the modules, shapes and shards of this rank, but cannot run. A replica becomes a
    whole table of this rank, because TorchRec always allocates the weights of its dense kernel.
    """
    own = ShardingPlan(
        plan.world_size,
        tuple(
            dataclasses.replace(shard, replicated=False)
            for shard in plan.shards
            if not shard.replicated or shard.rank == dist.get_rank()
        ),
    )
    return DistributedModelParallel(
        module=model,
        env=sharding_env(),
        device=torch.device("meta"),
        plan=TorchRecPlan({EMBEDDINGS: to_torchrec(own, tables, topology)}),
        sharders=[EmbeddingBagCollectionSharder()],
        init_data_parallel=False,
        init_parameters=False,
    )


def exchange_codecs(precision: ExchangePrecision) -> dict[str, QuantizedCommCodecs] | None:
    """Return TorchRec's codecs of pooled vectors, by collective; None if exchanges are exact.

    TorchRec's own registry replaces bf16 by fp16 on CPUs, and makes int8 codecs for reductions, in
    which they fail. gloo does exchange bf16, and reductions use `in_reductions`.
    """
    if precision.is_exact:
        return None
    return {
        CommOp.POOLED_EMBEDDINGS_ALL_TO_ALL.name: _codecs(precision),
        CommOp.POOLED_EMBEDDINGS_REDUCE_SCATTER.name: _codecs(precision.in_reductions),
    }


def _codecs(precision: ExchangePrecision) -> QuantizedCommCodecs:
    has_rows = "fp8" in (precision.forward, precision.backward)
    codecs = get_qcomm_codecs(
        QCommsConfig(
            forward_precision=CommType(precision.forward),
            backward_precision=CommType(precision.backward),
            fp8_quantize_dim=QUANTIZED_ROW if has_rows else None,
            fp8_quantize_dim_bwd=QUANTIZED_ROW if has_rows else None,
        )
    )
    if precision.backward == "fp16":
        codecs.backward = _ScaledCodec(codecs.backward, FP16_LOSS_SCALE)
    return codecs


class _ScaledCodec:
    """Multiplies numbers before an exchange, and divides them after it, in fp32.

    FBGEMM's own loss scale divides in fp16, which loses the small numbers that it should preserve:
    gradients of 1e-6 would keep 4 bits.
    """

    def __init__(self, codec: Any, scale: float) -> None:
        self._codec = codec
        self._scale = scale

    def encode(self, input_tensor: Tensor, ctx: Any = None) -> Tensor:
        return self._codec.encode(input_tensor * self._scale, ctx)

    def decode(self, input_grad: Tensor, ctx: Any = None) -> Tensor:
        decoded: Tensor = self._codec.decode(input_grad, ctx)
        return decoded / self._scale

    def __getattr__(self, name: str) -> Any:
        """Return the codec's attribute, such as its sizes, types and contexts."""
        return getattr(self._codec, name)


class _DenseInOwnGroup(DefaultDataParallelWrapper):
    """Reduces the gradients of the dense part in the job's process group, not in the tables' group.

    The exchanges of a group run one after the other, so the tables' exchanges would have to wait.
    """

    def wrap(self, dmp: DistributedModelParallel, env: ShardingEnv, device: torch.device) -> None:
        model = dmp._dmp_wrapped_module
        if isinstance(model, Dlrm) and model.dense_graph is not None:
            model.dense_graph.share_weights()
            return
        super().wrap(dmp, sharding_env(), device)
        wrapped = dmp._dmp_wrapped_module
        if isinstance(wrapped, DistributedDataParallel):
            # Without a hook, DDP divides each gradient by the number of ranks separately.
            wrapped._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)


def asked_of_dense_part(model: nn.Module) -> tuple[str | None, bool | None]:
    """Return the `compile_mode` and `dense_graph` of a wrapped model; None if still open."""
    found = next((m for m in model.modules() if isinstance(m, Dlrm)), None)
    return (NOT_COMPILED, False) if found is None else (found.compile_mode, found.has_graph)


def set_dense_part(
    wrapped: DistributedModelParallel, compile_mode: str, *, dense_graph: bool
) -> None:
    """Set the options that a wrapped model left open; a collective of all ranks, between two steps.

    Args:
        compile_mode, dense_graph: see `Dlrm`; options that are already set do not change.
    """
    for model in [m for m in wrapped.modules() if isinstance(m, Dlrm)]:
        if model.compile_mode is None:
            compile_layers(model.compiled_layers(), compile_mode, is_asked=False)
            model.compile_mode = compile_mode
        if model.dense_graph is None or model.has_graph is not None:
            continue
        model.has_graph = model.dense_graph.records = dense_graph
        if not dense_graph:
            model.dense_graph = None
            for weight in model.dense_weights():
                weight.grad = None
            if dist.get_world_size() > 1:
                wrapped._data_parallel_wrapper.wrap(wrapped, wrapped._env, wrapped.device)


def sharded_embeddings(model: nn.Module) -> ShardedEmbeddingBagCollection:
    """Return the sharded collection within a wrapped model."""
    return next(m for m in model.modules() if isinstance(m, ShardedEmbeddingBagCollection))


def initialize_tables(model: nn.Module, seed: int) -> None:
    """Fill all tables with uniform numbers within +-sqrt(1 / rows), as TorchRec does by default."""
    for name, weight in sharded_embeddings(model).state_dict().items():
        table = table_name(name.split(".")[-2])
        if isinstance(weight, ShardedTensor):
            for shard in weight.local_shards():
                fill_table(shard.tensor, shard.metadata.shard_offsets, weight.size(0), table, seed)
        else:  # a replica
            fill_table(weight, (0, 0), weight.size(0), table, seed)


def fill_table(
    shard: Tensor, offsets: Sequence[int], num_embeddings: int, table: str, seed: int
) -> None:
    """Fill the rectangle of a table that begins at `offsets` = (row, column).

    Every block of 65,536 rows x 4 columns has its own seed. So a weight depends only on its place
    in its table, and a rank draws few more numbers than it holds weights.
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
