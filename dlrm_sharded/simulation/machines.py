"""The hardware to choose from: its memory, its hosts, and what its ranks cost."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dlrm_sharded.dense.gpu_prices import DENSE_ERROR
from dlrm_sharded.files.errors import ConfigError, check_number
from dlrm_sharded.hardware.gpus.gpu_specs import GpuSpec, gpu_names, named_gpu_spec
from dlrm_sharded.plans.task import GIB, Topology
from dlrm_sharded.ranks.host_memory import available_host_bytes
from dlrm_sharded.ranks.process import num_cores

CPU = "cpu"
CPU_NAMES = (CPU, "here")
"""Names that users give to the CPUs of this machine."""


@dataclass(frozen=True, slots=True)
class TableMemory:
    """Memory for tables that the user states; the names are those of conf/topology.

    Args:
        memory_gib: of a rank; None for a fraction of what the hardware has.
    """

    memory_gib: float | None
    memory_fraction: float
    reserved_gib: float = 0.0

    def __post_init__(self) -> None:
        check_number("topology.memory_fraction", self.memory_fraction, above=True, most=1.0)
        check_number("topology.reserved_gib", self.reserved_gib)
        if self.memory_gib is not None:
            check_number("topology.memory_gib", self.memory_gib, above=True)

    def of(self, name: str, hardware_gib: float) -> int:
        """Return the memory for tables of hardware with so much memory, in bytes."""
        gib = self.memory_fraction * hardware_gib if self.memory_gib is None else self.memory_gib
        if gib <= self.reserved_gib:
            raise ConfigError(
                f"topology.reserved_gib is {self.reserved_gib:g}, which leaves nothing of the "
                f"{gib:.3g} GiB that {name} has for tables; reserve less"
            )
        return int((gib - self.reserved_gib) * GIB)


@dataclass(frozen=True, slots=True)
class Machine:
    """A kind of hardware.

    Args:
        name: what the user calls it.
        spec: data sheet of the GPU; None for the CPUs of this machine.
        rank_bytes: memory of one rank for tables; None for its share of `host_bytes`.
        host_bytes: memory that all ranks together can have; None if that follows from theirs.
        price: of one rank for an hour, in any currency; None if it is not known.
    """

    name: str
    spec: GpuSpec | None
    rank_bytes: int | None
    host_bytes: int | None = None
    price: float | None = None

    @property
    def is_gpu(self) -> bool:
        return self.spec is not None

    @property
    def key(self) -> str:
        """Name of the machine that is the same whatever the user calls it."""
        return CPU if self.spec is None else self.spec.key

    @property
    def dense_error(self) -> float:
        """Expected relative error of the dense part: priced for a GPU, or measured here."""
        return DENSE_ERROR if self.is_gpu else 0.0

    def topology(self, num_ranks: int, stated: Topology) -> Topology:
        """Return so many ranks on the machine's hosts.

        Args:
            stated: what the user says of all ranks; a host has `local_world_size` ranks there.

        Raises:
            ConfigError: the ranks do not fill hosts, or this machine has too little for them.
        """
        domain = num_ranks if self.spec is None else self.spec.gpus_of_domain
        per_host = stated.local_world_size or domain
        if num_ranks > per_host and num_ranks % per_host:
            raise ConfigError(f"{num_ranks} ranks do not fill hosts of {per_host}")
        if self.spec is None and num_ranks > num_cores():
            raise ConfigError(f"{num_ranks} ranks need as many cores, and there are {num_cores()}")
        rank_bytes = self.rank_bytes
        if rank_bytes is None:
            assert self.host_bytes is not None
            rank_bytes = self.host_bytes // num_ranks
        elif self.host_bytes is not None and num_ranks * rank_bytes > self.host_bytes:
            raise ConfigError(
                f"topology.memory_gib takes {num_ranks * rank_bytes / GIB:,.4g} GiB on "
                f"{num_ranks} ranks, and this machine has {self.host_bytes / GIB:,.4g} GiB "
                "available"
            )
        intra, inter = stated.intra_host_bytes_per_s, stated.inter_host_bytes_per_s
        if self.spec is not None:
            intra = intra or 1e9 * self.spec.link_gb_per_s
            inter = inter or 1e9 * self.spec.adapter_gb_per_s
        return dataclasses.replace(
            stated,
            world_size=num_ranks,
            local_world_size=min(num_ranks, per_host),
            memory_bytes=rank_bytes,
            compute_device="cuda" if self.is_gpu else "cpu",
            intra_host_bytes_per_s=intra,
            inter_host_bytes_per_s=inter,
        )


def machine_of(name: str, memory: TableMemory) -> Machine:
    """Return hosts with GPUs of one kind, or this machine, on whose CPUs the ranks compute.

    Raises:
        ConfigError: the GPU is not known, or has less memory than is stated.
    """
    if name in CPU_NAMES:
        available = available_host_bytes()
        num_bytes = memory.of(name, available / GIB)
        if memory.memory_gib is None:
            return Machine(name, None, rank_bytes=None, host_bytes=num_bytes)
        return Machine(name, None, rank_bytes=num_bytes, host_bytes=available)
    try:
        spec = named_gpu_spec(name, key="hardware")
    except ConfigError as error:
        known = ", ".join([*CPU_NAMES, *gpu_names()])
        raise ConfigError(f"hardware is {name!r}; known are {known}") from error
    if memory.memory_gib is None and spec.memory_gib is None:
        raise ConfigError(f"the memory of {name} is not known; set topology.memory_gib")
    if memory.memory_gib is not None:
        spec.check_memory(memory.memory_gib)
    return Machine(name, spec, memory.of(name, spec.memory_gib or 0.0))


def with_prices(machines: Sequence[Machine], prices: Any) -> list[Machine]:
    """Return the machines with the prices that a user states for all of them, or for none.

    A price may be stated under another name of the same GPU.

    Args:
        prices: prices by the name of a GPU; None for one that is not stated.

    Raises:
        ConfigError: this is no mapping; or a price is no positive number, of no machine, or
            missing for some machine.
    """
    if not isinstance(prices, Mapping):
        raise ConfigError(f"prices is {prices!r}; state a price for each GPU: prices.h100=2.5")
    stated = {name: price for name, price in prices.items() if price is not None}
    if not stated:
        return list(machines)
    by_key: dict[str, list[float]] = {machine.key: [] for machine in machines}
    for name, price in stated.items():
        check_number(f"prices.{name}", price, above=True)
        key = CPU if name in CPU_NAMES else named_gpu_spec(name, key="prices").key
        if key not in by_key:
            raise ConfigError(
                f"prices.{name} is stated, but hardware is "
                f"{', '.join(machine.name for machine in machines)}; add {name} to hardware"
            )
        by_key[key].append(price)
    for machine in machines:
        if len(of_machine := by_key[machine.key]) != 1:
            missing = "is stated under several names" if of_machine else "is not set"
            raise ConfigError(
                f"prices.{machine.name} {missing}; state one price for each of hardware, or none"
            )
    return [dataclasses.replace(machine, price=by_key[machine.key][0]) for machine in machines]
