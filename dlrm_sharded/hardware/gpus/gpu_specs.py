"""Data sheets of GPUs, found by the names that CUDA gives to devices."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from dlrm_sharded.files.errors import ConfigError, check_number

GENERIC = "h100_sxm"
"""Key of the GPU whose figures are used for an unknown data-center GPU."""

MOST_COMMON = {"v100": "v100_sxm", "a100": "a100_sxm_80gb", "a800": "a800_sxm", "h100": "h100_sxm"}
"""The variant that users mean if they name none."""

STATED_REQUIRED = ("memory_gb_per_s", "link_gb_per_s")
STATED_OPTIONAL = ("l2_mb", "multiprocessors", "clock_ghz", "adapter_gb_per_s")

LEAST_NVLINK_GB_PER_S = 100.0
"""Stated links that are at least this fast count as NVLink; the fastest PCIe here has 64 GB/s."""


@dataclass(frozen=True, slots=True)
class GpuSpec:
    """The figures of one kind of GPU.

    Args:
        key: short name, such as h100_sxm.
        names: names by which CUDA knows the device.
        memory_gb_per_s: nominal bandwidth of the device's memory.
        l2_mb: size of the L2 cache.
        multiprocessors, clock_ghz: number of streaming multiprocessors, and their boost clock.
        link: class of the links between GPUs of one host, "nvlink" or "pcie".
        link_gb_per_s: nominal bandwidth of a GPU's links, one way.
        adapter_gb_per_s: nominal bandwidth of a GPU's share of the adapters to other hosts.
        memory_gib: size of the device's memory; None if unknown.
        gpus_of_domain: number of GPUs that the links connect, such as those of one host.
        collectives: system in nccl_collectives.csv; None if nobody measured this GPU.
    """

    key: str
    names: tuple[str, ...]
    memory_gb_per_s: float
    l2_mb: float
    multiprocessors: float
    clock_ghz: float
    link: str
    link_gb_per_s: float
    adapter_gb_per_s: float
    memory_gib: float | None = None
    gpus_of_domain: int = 8
    collectives: str | None = None

    @property
    def device_name(self) -> str:
        """Name by which artifacts and runs know the GPU."""
        return self.names[0]

    @property
    def multiprocessor_ghz(self) -> float:
        """Cycles of all multiprocessors in a nanosecond."""
        return self.multiprocessors * self.clock_ghz

    def check_memory(self, stated_gib: float) -> None:
        """Raise ConfigError if a user states more memory of a rank than the GPU has."""
        if self.memory_gib is not None and stated_gib > self.memory_gib:
            raise ConfigError(
                f"{stated_gib:,.4g} GiB of a rank are stated for tables (topology.memory_gib), and "
                f"hardware = {self.key} has {self.memory_gib:g} GiB; state at most that"
            )

    @classmethod
    def stated(cls, figures: Mapping[str, Any], *, key: str) -> GpuSpec:
        """Return a GPU without a data sheet here, from figures that a user states.

        The L2 cache, the multiprocessors and the adapter may be missing; they then have an H100's
        ratio to the memory bandwidth or to the link. A missing clock is an H100's.

        Args:
            key: config key of the figures, for messages.

        Raises:
            ConfigError: a figure is missing, unknown or not a positive number.
        """
        if not set(STATED_REQUIRED) <= set(figures) <= {*STATED_REQUIRED, *STATED_OPTIONAL}:
            raise ConfigError(
                f"{key} has the keys {sorted(map(str, figures))}; it needs "
                f"{' and '.join(STATED_REQUIRED)}, and may have {', '.join(STATED_OPTIONAL)}"
            )
        for name, value in figures.items():
            check_number(f"{key}.{name}", value, above=True, most=1e9)
        memory, link = (float(figures[name]) for name in STATED_REQUIRED)
        h100 = gpu_specs()[GENERIC]
        assumed: dict[str, Any] = {
            "l2_mb": memory * (h100.l2_mb / h100.memory_gb_per_s),
            "multiprocessors": memory * (h100.multiprocessors / h100.memory_gb_per_s),
            "clock_ghz": h100.clock_ghz,
            "adapter_gb_per_s": link * (h100.adapter_gb_per_s / h100.link_gb_per_s),
        }
        return cls(
            key="stated",
            names=("GPU with stated figures",),
            link="nvlink" if link >= LEAST_NVLINK_GB_PER_S else "pcie",
            **{**assumed, **{name: float(value) for name, value in figures.items()}},
        )


@functools.cache
def gpu_specs() -> dict[str, GpuSpec]:
    """Return all GPUs of gpus.json by their keys."""
    text = files(__package__).joinpath("gpus.json").read_text(encoding="utf-8")
    return {
        key: GpuSpec(key=key, **{**fields, "names": tuple(fields["names"])})
        for key, fields in json.loads(text)["gpus"].items()
    }


def gpu_names() -> list[str]:
    """Return all names of GPUs that users may write, without a variant (h200) and with it."""
    short = (key.partition("_")[0] for key in gpu_specs())
    usual = (name for name in short if find_gpu_spec(MOST_COMMON.get(name, name)))
    return [*dict.fromkeys(name for name in usual if name not in gpu_specs()), *gpu_specs()]


def find_gpu_spec(name: str) -> GpuSpec | None:
    """Return the GPU with this key or CUDA name; None if there is none.

    The vendor, punctuation and case do not count. Parts of a divided GPU (MIG) are not found,
    because they have neither its bandwidth nor its links.
    """
    wanted = _normalized(name)
    for spec in gpu_specs().values():
        if wanted in map(_normalized, (spec.key, *spec.names)):
            return spec
    return None


def named_gpu_spec(name: str, *, key: str) -> GpuSpec:
    """Return the GPU with a name from the config; ConfigError if there is none.

    Users may leave out the variant, see `MOST_COMMON`.
    """
    spec = find_gpu_spec(MOST_COMMON.get(name.lower(), name)) if isinstance(name, str) else None
    if spec is None:
        raise ConfigError(
            f"{key} is {name!r}; known are {', '.join(gpu_names())}; "
            "state the figures of another GPU in cost_model.gpu"
        )
    return spec


def _normalized(name: str) -> str:
    words = re.sub("[^a-z0-9]+", " ", name.lower()).split()
    return " ".join(word for word in words if word not in ("nvidia", "tesla"))
