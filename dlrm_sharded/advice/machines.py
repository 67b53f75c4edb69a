"""The hardware to choose from: its memory, its hosts, and what its prices are."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dlrm_sharded.files.errors import ConfigError, check_number
from dlrm_sharded.files.provenance import fbgemm_version, versions
from dlrm_sharded.hardware.context import RunContext
from dlrm_sharded.hardware.gpus.gpu_specs import MOST_COMMON, GpuSpec, gpu_specs, named_gpu_spec
from dlrm_sharded.hardware.hardware import Hardware
from dlrm_sharded.plans.task import GIB, Topology
from dlrm_sharded.ranks.host_memory import available_host_bytes
from dlrm_sharded.ranks.process import num_cores

CPU_NAMES = ("cpu", "here")
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
        hardware: what ranks compute on.
        memory_bytes: memory of one rank for tables, or of all ranks together.
        shares_memory: whether it is that of all ranks together.
        available_bytes: memory that all ranks together can have; None if that follows from theirs.
        optimizer: fused optimizer of the tables; None if it is not known.
        price: of one rank for an hour, in any currency; None if it is not known.
        fbgemm: version of FBGEMM that looks up rows; None if it is not known.
    """

    name: str
    spec: GpuSpec | None
    hardware: Hardware
    memory_bytes: int
    shares_memory: bool = False
    available_bytes: int | None = None
    optimizer: str | None = None
    price: float | None = None
    fbgemm: str | None = None

    @property
    def is_gpu(self) -> bool:
        return self.spec is not None

    def topology(self, num_ranks: int, stated: Topology) -> Topology:
        """Return so many ranks on the machine's hosts.

        Args:
            stated: what the user says of all ranks; a host has `local_world_size` ranks there.

        Raises:
            ConfigError: the ranks do not fill hosts.
        """
        per_host = stated.local_world_size or self._ranks_per_host(num_ranks)
        if num_ranks > per_host and num_ranks % per_host:
            raise ConfigError(f"{num_ranks} ranks do not fill hosts of {per_host}")
        if self.spec is None and num_ranks > num_cores():
            raise ConfigError(f"{num_ranks} ranks need as many cores, and there are {num_cores()}")
        if self.available_bytes is not None and num_ranks * self.memory_bytes > (
            available := self.available_bytes
        ):
            raise ConfigError(
                f"topology.memory_gib takes {num_ranks * self.memory_bytes / GIB:,.4g} GiB on "
                f"{num_ranks} ranks, and this machine has {available / GIB:,.4g} GiB available"
            )
        intra, inter = stated.intra_host_bytes_per_s, stated.inter_host_bytes_per_s
        if self.spec is not None:
            intra = intra or 1e9 * self.spec.link_gb_per_s
            inter = inter or 1e9 * self.spec.adapter_gb_per_s
        return dataclasses.replace(
            stated,
            world_size=num_ranks,
            local_world_size=min(num_ranks, per_host),
            memory_bytes=self.memory_bytes // (num_ranks if self.shares_memory else 1),
            compute_device="cuda" if self.is_gpu else "cpu",
            intra_host_bytes_per_s=intra,
            inter_host_bytes_per_s=inter,
        )

    def context(self, topology: Topology) -> RunContext:
        """Return the run for which a sharder and prices are chosen."""
        return RunContext(
            topology.compute_device,
            self.hardware,
            self.optimizer,
            topology.ranks_per_host,
            self.fbgemm,
        )

    def _ranks_per_host(self, num_ranks: int) -> int:
        return num_ranks if self.spec is None else self.spec.gpus_of_domain


def gpu_machine(name: str, memory: TableMemory, *, optimizer: str | None) -> Machine:
    """Return hosts with GPUs of one kind.

    Raises:
        ConfigError: the GPU is not known.
    """
    try:
        spec = named_gpu_spec(name, key="hardware")
    except ConfigError as error:
        known = ", ".join([*CPU_NAMES, *MOST_COMMON, *gpu_specs()])
        raise ConfigError(f"hardware is {name!r}; known are {known}") from error
    if memory.memory_gib is None and spec.memory_gib is None:
        raise ConfigError(f"the memory of {name} is not known; set topology.memory_gib")
    if memory.memory_gib is not None:
        spec.check_memory(memory.memory_gib)
    num_bytes = memory.of(name, spec.memory_gib or 0.0)
    return Machine(name, spec, Hardware(spec.device_name), num_bytes, optimizer=optimizer)


def cpu_machine(
    name: str, memory: TableMemory, hardware: Hardware, *, optimizer: str | None
) -> Machine:
    """Return this machine, on whose CPUs the ranks compute and share the memory that is free."""
    available = available_host_bytes()
    num_bytes = memory.of(name, available / GIB)
    shares = memory.memory_gib is None
    return Machine(
        name,
        None,
        hardware,
        num_bytes,
        shares_memory=shares,
        available_bytes=None if shares else available,
        optimizer=optimizer,
        fbgemm=fbgemm_version(versions()),
    )


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
    for name, price in stated.items():
        check_number(f"prices.{name}", price, above=True)
        if not any(_is_called(machine, name) for machine in machines):
            raise ConfigError(
                f"prices.{name} is stated, but hardware is "
                f"{', '.join(machine.name for machine in machines)}; add {name} to hardware"
            )
    if not stated:
        return list(machines)
    found = []
    for machine in machines:
        of_machine = [price for name, price in stated.items() if _is_called(machine, name)]
        if len(of_machine) != 1:
            missing = "is not set" if not of_machine else "is stated under several names"
            raise ConfigError(
                f"prices.{machine.name} {missing}; state one price for each of hardware, or none"
            )
        found.append(dataclasses.replace(machine, price=of_machine[0]))
    return found


def _is_called(machine: Machine, name: str) -> bool:
    if machine.spec is None or name in CPU_NAMES:
        return machine.spec is None and name in CPU_NAMES
    return named_gpu_spec(name, key="prices") == machine.spec
