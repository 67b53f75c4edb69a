"""The memory that every rank of a run needs at its peak, estimated before anything is built.

What lives for the whole run is known exactly. What a step needs temporarily is estimated at its
moments of largest use, from what TorchRec and FBGEMM allocate there.

Letters: W ranks, B global batch, b = B / W, D columns of all tables, D_r columns of a rank's
shards.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from dlrm_sharded.checkpoint.logical import PART_BYTES
from dlrm_sharded.plans.plan import Shard, ShardingPlan
from dlrm_sharded.plans.task import REPLICA_GRADIENT_BYTES, ShardingTask
from dlrm_sharded.training.dense_memory import DenseMemory
from dlrm_sharded.training.pipelines import PIPELINES
from dlrm_sharded.training.rank_memory import RankMemory

FLOAT_BYTES = ID_BYTES = LENGTH_BYTES = 4
LONG_BYTES = 8
"""FBGEMM converts ids and offsets to 64 bits."""

SORT_BYTES_PER_ID = {"cpu": 16, "cuda": 40}
"""Memory per id in which FBGEMM's backward pass groups the ids by row, to update each row once."""

EVALUATION_BYTES_PER_SAMPLE = 64
"""Predictions and labels of all ranks, and what it takes to sort and count them for the AUROC."""

HEAP_FACTOR, ID_HEAP_FACTOR = 2.4, 1.25
"""Memory that a process on a CPU takes for vectors and for ids, relative to their live tensors.

The C library keeps freed blocks for speed (`process.keep_freed_memory`). It often finds none of the
right size and alignment for the next tensor, so the heap grows in the first tens of steps. The
factors were measured, see docs/notes/measurements.md.
"""

CUDA_SLACK = 0.25
"""Free memory in torch's blocks on a GPU, relative to temporary tensors there: an assumption.

Blocks above 10 MiB are multiples of 2 MiB, and what is free between them may be too small. Ids of
changing sizes on several streams leave more: a benchmark of TorchRec with 2 ranks held 34 % more
than its tensors, tables included (meta-pytorch/torchrec#3807).
"""

NCCL_BYTES = 2 * 2**30
"""Buffers of two communicators, of the job and of the tables, on a GPU: an assumption.

Between 0.5 GiB (NVIDIA/nccl#2366) and 1.6 GB (#864) are reported for one; more links take more.
"""

PINNED_BATCH_FACTOR = 2
"""Largest ratio of page-locked memory to its batches: torch rounds tensors to a power of two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryNeeds:
    """The parts of a run, besides its task and plan, that take memory on a rank.

    Args:
        dense: the model's dense part.
        dense_state_bytes: optimizer state of the dense part.
        num_dense: dense features of a sample.
        num_measured_batches: batches that the measurement of the embedding cost holds.
        num_eval_samples: samples of an evaluation, of all ranks.
        cached_batch_bytes: batches that the dataset keeps on a rank.
        checkpoint_copy: whether checkpoints are written from a copy of the model.
        pipeline: name of the training pipeline.
    """

    dense: DenseMemory
    dense_state_bytes: int
    num_dense: int
    num_measured_batches: int
    num_eval_samples: int
    cached_batch_bytes: int = 0
    checkpoint_copy: bool = False
    pipeline: str = "base"

    @property
    def dense_bytes(self) -> int:
        """Weights, buffers and optimizer state of the dense part, without gradients."""
        return self.dense.parameter_bytes + self.dense.buffer_bytes + self.dense_state_bytes


def estimate_memory(
    plan: ShardingPlan, task: ShardingTask, needs: MemoryNeeds, process_bytes: Sequence[int]
) -> tuple[RankMemory, ...]:
    """Estimate every rank's memory at its peak; for ranks on GPUs, the GPU's memory only.

    Args:
        process_bytes: measured memory of each rank's process before anything is built.
    """
    return tuple(
        _estimate(_RankLoad.of(rank, plan, task), task, needs, process_bytes[rank])
        for rank in range(plan.world_size)
    )


def estimate_host_memory(
    plan: ShardingPlan, task: ShardingTask, needs: MemoryNeeds
) -> tuple[RankMemory, ...]:
    """Estimate the host memory that every rank on a GPU takes besides its process.

    Batches and copies for checkpoints are page-locked. Without a copy of the whole model, a block
    of it is copied at a time.
    """

    def estimate(rank: int) -> RankMemory:
        copy = _copied_bytes(_RankLoad.of(rank, plan, task), needs)
        return RankMemory(
            cached_batches=PINNED_BATCH_FACTOR * needs.cached_batch_bytes,
            checkpoint_copy=copy if needs.checkpoint_copy else min(copy, PART_BYTES),
        )

    return tuple(map(estimate, range(plan.world_size)))


def _copied_bytes(load: _RankLoad, needs: MemoryNeeds) -> int:
    """Return the memory of a copy of a rank's part of the model."""
    return load.weight_bytes + load.state_bytes + needs.dense_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class _RankLoad:
    """One rank's share of a global batch.

    Args:
        weight_bytes, state_bytes: its shards' weights and optimizer state.
        replica_bytes: weights of its replicas, which `weight_bytes` contains.
        replica_gradient_bytes: their gradients, held by the lookup and again by DDP.
        local_ids, local_lengths: numbers of ids and of lengths in its samples, of all tables.
        ids, lengths: the same for its shards, in all samples, and its replicas, in its own samples.
        local_bytes: fp32 vectors of all tables for its samples, [b, D].
        pooled_bytes: fp32 vectors of its shards for all samples, [B, D_r], and of its replicas for
            its own samples.
        exchanged_bytes: sum of both, without replicas, whose vectors no rank sends.
    """

    weight_bytes: int
    state_bytes: int
    replica_bytes: int
    replica_gradient_bytes: int
    local_ids: int
    local_lengths: int
    ids: int
    lengths: int
    local_bytes: int
    pooled_bytes: int
    exchanged_bytes: int

    @classmethod
    def of(cls, rank: int, plan: ShardingPlan, task: ShardingTask) -> _RankLoad:
        tables = {table.name: table for table in task.tables}
        local_batch_size = task.batch_size // plan.world_size
        shards = plan.shards_by_rank()[rank]
        replicas = [shard for shard in shards if shard.replicated]

        def num_samples(shard: Shard) -> int:
            return local_batch_size if shard.replicated else task.batch_size

        def num_ids(shard: Shard) -> float:
            # Ids are spread over a table's rows, so a block of rows gets its share of them.
            table = tables[shard.table]
            share = shard.num_rows / table.num_embeddings
            return num_samples(shard) * table.pooling_factor * share

        def weight_bytes(held: Sequence[Shard]) -> int:
            return sum(shard.weight_bytes for shard in held)

        def num_vectors(shard: Shard) -> float:
            table = tables[shard.table]
            return num_samples(shard) * table.num_features if table.pooled else num_ids(shard)

        def vector_bytes(held: Sequence[Shard]) -> int:
            return int(sum(FLOAT_BYTES * num_vectors(shard) * shard.num_cols for shard in held))

        held_bytes = sum(shard.bytes_on(task.topology) for shard in shards)
        gradient_bytes = weight_bytes(replicas) * REPLICA_GRADIENT_BYTES // FLOAT_BYTES
        local_bytes = int(
            FLOAT_BYTES
            * local_batch_size
            * sum(t.embedding_dim * t.vectors_per_sample for t in task.tables)
        )
        return cls(
            weight_bytes=weight_bytes(shards),
            state_bytes=held_bytes - weight_bytes(shards) - gradient_bytes,
            replica_bytes=weight_bytes(replicas),
            replica_gradient_bytes=gradient_bytes,
            local_ids=int(local_batch_size * sum(table.pooling_factor for table in task.tables)),
            local_lengths=local_batch_size * sum(t.num_features for t in task.tables),
            ids=int(sum(num_ids(shard) for shard in shards)),
            lengths=sum(num_samples(s) * tables[s.table].num_features for s in shards),
            local_bytes=local_bytes,
            pooled_bytes=vector_bytes(shards),
            exchanged_bytes=local_bytes + vector_bytes(shards) - 2 * vector_bytes(replicas),
        )


def _estimate(
    load: _RankLoad, task: ShardingTask, needs: MemoryNeeds, process_bytes: int
) -> RankMemory:
    device = task.topology.compute_device
    dense = needs.dense
    measuring = _moments_of_measurement(load, task, needs)
    training_step = _moments_of_training(load, task, needs)
    measurement, training = _largest(measuring), _largest(training_step)
    peak = max(measurement, training, key=lambda moment: moment.needed)
    if device == "cuda":
        slack = int(CUDA_SLACK * (peak.ids + _vectors(peak)))
    else:
        # The heap keeps the blocks of other moments, and later tensors fit them only in part.
        peak = dataclasses.replace(
            peak, ids=max(moment.ids for moment in (*measuring, *training_step))
        )
        # Vectors of the training step can reuse the blocks in which the measurement sorted ids,
        # but rarely other blocks.
        free = SORT_BYTES_PER_ID[device] * load.ids
        heap = HEAP_FACTOR * _vectors(measurement)
        heap += max(0, HEAP_FACTOR * _vectors(training) - free)
        slack = max(0, int(heap) - _vectors(peak)) + int((ID_HEAP_FACTOR - 1) * peak.ids)
    exchanges = task.topology.world_size > 1
    copies = device == "cpu" and needs.checkpoint_copy
    return dataclasses.replace(
        peak,
        process=process_bytes,
        table_weights=load.weight_bytes,
        table_optimizer=load.state_bytes,
        replica_gradients=peak.replica_gradients + load.replica_gradient_bytes,
        dense=dense.parameter_bytes + needs.dense_bytes,  # with gradients
        # with DDP's buckets, or the gradients that a graph gives
        exchange=peak.exchange + (exchanges or _has_graphs(task, needs)) * dense.parameter_bytes,
        evaluation=EVALUATION_BYTES_PER_SAMPLE * needs.num_eval_samples,
        nccl=NCCL_BYTES if device == "cuda" and exchanges else 0,
        slack=slack,
        cached_batches=needs.cached_batch_bytes if device == "cpu" else 0,
        checkpoint_copy=_copied_bytes(load, needs) if copies else 0,
    )


def _largest(moments: Sequence[RankMemory]) -> RankMemory:
    return max(moments, key=lambda moment: moment.needed)


def _vectors(moment: RankMemory) -> int:
    return moment.vectors + moment.exchange


def _moments_of_measurement(
    load: _RankLoad, task: ShardingTask, needs: MemoryNeeds
) -> list[RankMemory]:
    """Return the temporary memory at two moments of measuring the embedding cost.

    Exchanges have an input and an output buffer in addition to the vectors they send or receive.
    Replicas have a bucket in addition to DDP's, see `measuring/replica_stages.py`.
    """
    exchanges = task.topology.world_size > 1
    local, pooled = load.local_bytes, load.pooled_bytes
    ids = needs.num_measured_batches * _batch_bytes(load, task, needs) + _received(load, task)
    sorting = SORT_BYTES_PER_ID[task.topology.compute_device] * load.ids
    return [
        RankMemory(  # gradients, which are zeros, on their way back
            ids=ids,
            vectors=pooled + (2 * local if exchanges else pooled),
            exchange=exchanges * load.exchanged_bytes,
            replica_gradients=load.replica_bytes,
        ),
        RankMemory(  # update of the tables
            ids=ids + sorting,
            vectors=(2 if exchanges else 3) * pooled + exchanges * 2 * local,
            replica_gradients=load.replica_bytes,
        ),
    ]


def _moments_of_training(
    load: _RankLoad, task: ShardingTask, needs: MemoryNeeds
) -> list[RankMemory]:
    """Return the temporary memory at three moments of a training step.

    Activations in CUDA graphs are not freed for the tables, so they live at all moments.
    """
    exchanges = task.topology.world_size > 1
    device = task.topology.compute_device
    local, pooled = load.local_bytes, load.pooled_bytes
    num_batches = PIPELINES[needs.pipeline]
    ids = num_batches * _batch_bytes(load, task, needs) + _received(load, task)
    ids += (num_batches - 2) * _arrived(load, task)
    vectors, exchange = pooled + exchanges * local, exchanges * load.exchanged_bytes
    held = 0
    if _has_graphs(task, needs):  # which copy features and labels
        num_samples = task.batch_size // task.topology.world_size
        held = needs.dense.activation_bytes
        held += FLOAT_BYTES * num_samples * (needs.num_dense + 1)
    return [
        RankMemory(ids=ids, vectors=held + vectors, exchange=exchange),  # exchange of the vectors
        RankMemory(ids=ids, vectors=needs.dense.activation_bytes),  # dense part
        RankMemory(  # update of the tables
            ids=ids + SORT_BYTES_PER_ID[device] * load.ids,
            vectors=held + vectors,
            exchange=exchange,
        ),
    ]


def _has_graphs(task: ShardingTask, needs: MemoryNeeds) -> bool:
    return needs.dense.has_graphs and task.topology.compute_device == "cuda"


def _batch_bytes(load: _RankLoad, task: ShardingTask, needs: MemoryNeeds) -> int:
    """Return the memory of a rank's share of a batch, as the dataset gives it."""
    local_batch_size = task.batch_size // task.topology.world_size
    return (
        ID_BYTES * load.local_ids
        + LENGTH_BYTES * load.local_lengths
        + FLOAT_BYTES * local_batch_size * (needs.num_dense + 1)
    )


def _received(load: _RankLoad, task: ShardingTask) -> int:
    """Return the memory of the ids that a rank looks up, as received and as FBGEMM keeps them."""
    return LONG_BYTES * (load.ids + load.lengths) + _arrived(load, task)


def _arrived(load: _RankLoad, task: ShardingTask) -> int:
    """Return the memory of the ids of a batch as they arrive from the other ranks."""
    if task.topology.world_size == 1:
        return 0
    return ID_BYTES * load.ids + 2 * LENGTH_BYTES * load.lengths
