"""The `topology` settings of a config, and the topology that follows from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dlrm_sharded.files.errors import ConfigError, check_count, check_number
from dlrm_sharded.plans.task import GIB, MAX_RANKS, Topology

BYTES_PER_GB = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class TopologySettings:
    """The keys of `topology` in a config, see conf/topology.

    Args:
        memory_gib: memory of a rank for tables; None for `memory_fraction` of what is available.
        memory_fraction: fraction of a rank's available memory for tables; the rest is for
            activations, buffers and dense layers.
        reserved_gib: subtracted from either, for everything else that a rank holds.
        intra_host_gb_per_s, inter_host_gb_per_s: bandwidth of a rank in one direction, in GB/s.
        hardware, gpus_per_host: GPU model and GPUs per host of topologies that are compared.
        world_size, ranks_per_host, compute_device: ranks to plan for without a job.

    Raises:
        ConfigError: a value cannot be used.
    """

    memory_gib: float | None = None
    memory_fraction: float = 0.7
    reserved_gib: float = 0.0
    intra_host_gb_per_s: float | None = None
    inter_host_gb_per_s: float | None = None
    hardware: str | None = None
    gpus_per_host: int | None = None
    world_size: int = 1
    ranks_per_host: int | None = None
    compute_device: str = "cuda"

    def __post_init__(self) -> None:
        check_number("topology.memory_fraction", self.memory_fraction, most=1.0, above=True)
        check_number("topology.reserved_gib", self.reserved_gib)
        for key in ("memory_gib", "intra_host_gb_per_s", "inter_host_gb_per_s"):
            if (value := getattr(self, key)) is not None:
                check_number(f"topology.{key}", value, above=True)
        check_count("topology.world_size", self.world_size, least=1, most=MAX_RANKS)
        if self.ranks_per_host is not None:
            check_count("topology.ranks_per_host", self.ranks_per_host, least=1)
            if self.world_size % self.ranks_per_host:
                raise ConfigError(
                    f"topology.ranks_per_host is {self.ranks_per_host}; it must divide "
                    f"topology.world_size = {self.world_size}"
                )

    def topology(self, available_bytes: float | None = None, **further: Any) -> Topology:
        """Return the topology of these ranks.

        Args:
            available_bytes: memory of a rank, of which tables get `memory_fraction`; None if it is
                not known.
            further: fields of `Topology` that no config states, such as an optimizer's.

        Raises:
            ConfigError: the memory is not known, or `reserved_gib` leaves none for tables.
        """
        if self.memory_gib is not None:
            limit_bytes, source = self.memory_gib * GIB, "memory_gib"
        elif available_bytes is not None:
            limit_bytes = self.memory_fraction * available_bytes
            source = "memory_fraction of what is free"
        else:
            raise ConfigError(
                "topology.memory_gib is not set; a plan from data needs the memory of a rank for "
                "tables, in GiB"
            )
        memory_bytes = int(limit_bytes - self.reserved_gib * GIB)
        if self.reserved_gib and memory_bytes < 1:
            raise ConfigError(
                f"topology.reserved_gib is {self.reserved_gib:g}, which leaves nothing for tables "
                f"of the {limit_bytes / GIB:.2f} GiB of a rank (topology.{source}); reserve less"
            )
        return Topology(
            world_size=self.world_size,
            memory_bytes=memory_bytes,
            local_world_size=self.ranks_per_host,
            compute_device=self.compute_device,
            intra_host_bytes_per_s=_bytes_per_s(self.intra_host_gb_per_s),
            inter_host_bytes_per_s=_bytes_per_s(self.inter_host_gb_per_s),
            **further,
        )


def _bytes_per_s(gb_per_s: float | None) -> float | None:
    return None if gb_per_s is None else gb_per_s * BYTES_PER_GB
