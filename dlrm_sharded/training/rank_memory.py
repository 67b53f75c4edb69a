"""Says how much memory ranks need, on their GPUs or hosts, and whether it is available."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from dlrm_sharded.files.errors import InfeasibleTaskError
from dlrm_sharded.plans.task import GIB

PART_NAMES = {
    "process": "process: interpreter, libraries, data",
    "table_weights": "table shards",
    "table_optimizer": "optimizer state of the tables",
    "replica_gradients": "gradients of replicas, and their buckets",
    "dense": "dense part: weights, gradients, optimizer",
    "ids": "ids in flight",
    "vectors": "pooled vectors, activations, gradients",
    "exchange": "communication buffers",
    "evaluation": "predictions of the evaluation",
    "nccl": "buffers of NCCL",
    "slack": "free blocks of the allocator",
    "cached_batches": "cached batches of the dataset",
    "checkpoint_copy": "copy of the model for a checkpoint",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """Memory of one rank at its peak, in bytes, by what needs it.

    A rank on a GPU has two of these, one for the GPU and one for the host; on a CPU it has one.

    Args:
        process: memory that the process used before anything was built, which is measured; on
            CUDA the context.
    """

    process: int = 0
    table_weights: int = 0
    table_optimizer: int = 0
    replica_gradients: int = 0
    dense: int = 0
    ids: int = 0
    vectors: int = 0
    exchange: int = 0
    evaluation: int = 0
    nccl: int = 0
    slack: int = 0
    cached_batches: int = 0
    checkpoint_copy: int = 0

    @property
    def total(self) -> int:
        return sum(dataclasses.astuple(self))

    @property
    def needed(self) -> int:
        """Memory that the rank takes in addition to what its process uses already."""
        return self.total - self.process

    @property
    def tensors(self) -> int:
        """Memory of the tensors alone, as torch counts it on a GPU."""
        return self.needed - self.nccl - self.slack

    def largest(self, count: int) -> list[tuple[str, int]]:
        """Return the largest parts that the run adds, as pairs of their names and bytes."""
        parts = [(PART_NAMES[key], value) for key, value in self._parts() if key != "process"]
        return sorted(parts, key=lambda part: part[1], reverse=True)[:count]

    def to_json(self) -> dict[str, int]:
        """Return the parts and their total, in bytes."""
        return {
            **{f"{key}_bytes": value for key, value in self._parts()},
            "total_bytes": self.total,
        }

    def _parts(self) -> list[tuple[str, int]]:
        return [(key, getattr(self, key)) for key in PART_NAMES]


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """The memory of GPUs, which each rank has to itself, or of hosts, which their ranks share.

    Args:
        ranks: what each rank needs.
        available_bytes: memory that is still free for each rank; ranks of a host share it.
        ranks_per_host: number of ranks that share the memory; 1 for GPU memory.
        is_host: whether it is the host memory of ranks on GPUs.
    """

    ranks: tuple[RankMemory, ...]
    available_bytes: Sequence[int]
    ranks_per_host: int
    is_host: bool = False

    def fullest(self) -> tuple[range, int, int]:
        """Return the ranks of the fullest host, the bytes that they need, and those available."""
        hosts = [
            range(first, first + self.ranks_per_host)
            for first in range(0, len(self.ranks), self.ranks_per_host)
        ]

        def figures(ranks: range) -> tuple[int, int]:
            needed = sum(self.ranks[rank].needed for rank in ranks)
            return needed, min(self.available_bytes[rank] for rank in ranks)

        fullest = min(hosts, key=lambda ranks: figures(ranks)[1] - figures(ranks)[0])
        return fullest, *figures(fullest)

    def check(self) -> None:
        """Refuse a plan whose ranks need more memory than there is.

        Raises:
            InfeasibleTaskError: the message names the fullest rank, its largest parts and what to
                do.
        """
        ranks, needed, available = self.fullest()
        if needed <= available:
            return
        fullest = max(ranks, key=lambda rank: self.ranks[rank].needed)
        memory = self.ranks[fullest]
        parts = ", ".join(
            f"{name} {value / GIB:.2f} GiB" for name, value in memory.largest(4) if value
        )
        together = (
            f"the {len(ranks)} ranks of its host need {needed / GIB:.2f} GiB together, and "
            if len(ranks) > 1
            else ""
        )
        of_host = " of host memory" if self.is_host else ""
        remedy = (
            "use trainer.checkpoint.background=false, lower data.cache_gib"
            if self.is_host
            else "add ranks or hosts, lower batch_size or data.cache_gib, use optimizer=sgd"
        )
        raise InfeasibleTaskError(
            f"rank {fullest} needs {memory.needed / GIB:.2f} GiB{of_host} ({parts}); {together}"
            f"{available / GIB:.2f} GiB are available; {remedy}, or train all the same with "
            "check_memory=false, because the estimate may be off by 10 %"
        )


def memory_text(memory: RankMemory) -> str:
    """Write the parts of a rank's memory as lines of a table, the total last."""
    rows = [(PART_NAMES[key], value) for key, value in memory._parts() if value]
    rows.append(("total at the peak", memory.total))
    return "\n".join(f"  {name:<42}{value / GIB:9.3f} GiB" for name, value in rows)
