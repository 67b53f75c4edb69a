"""Detects the hardware of this process, and keeps its probe until the machine boots again."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from pathlib import Path

import torch
import torch.distributed as dist

from dlrm_sharded.files.errors import UserError
from dlrm_sharded.files.json_files import read_json_object, write_json
from dlrm_sharded.files.json_forms import read_form
from dlrm_sharded.files.provenance import device_name, fbgemm_version, versions
from dlrm_sharded.files.user_cache import user_cache
from dlrm_sharded.hardware.artifact import CALIBRATED
from dlrm_sharded.hardware.context import RunContext
from dlrm_sharded.hardware.cpu import read_cpu
from dlrm_sharded.hardware.cuda import read_gpu
from dlrm_sharded.hardware.fingerprint import Fingerprint
from dlrm_sharded.hardware.hardware import Hardware
from dlrm_sharded.hardware.probe import Probe
from dlrm_sharded.hardware.probing import measure_exchange, measure_probe
from dlrm_sharded.ranks.agreement import on_rank_zero
from dlrm_sharded.ranks.distributed import Rank
from dlrm_sharded.ranks.process import forget_peak_memory, release_freed_memory

log = logging.getLogger(__name__)

MAX_LOAD_PER_CORE = 3
"""A probe is kept if at most this many processes per core ran or waited when it was made.

A probe with several threads, which wait for each other, is kept if each process had a core.
"""

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclasses.dataclass(frozen=True, slots=True)
class _CachedProbe:
    """A probe in the cache, and the boot in which it was measured."""

    boot: str
    probe: Probe


def context_of_job(rank: Rank, optimizer: str | None) -> RunContext:
    """Return what the ranks of a job compute on; all of them call it together.

    Args:
        optimizer: fused optimizer of the tables; None if any will do.
    """
    return _context(detect_hardware(rank), rank.device, optimizer, rank.local_world_size)


def local_context(device: torch.device, optimizer: str | None, ranks_per_host: int) -> RunContext:
    """Return what ranks like this process compute on, for a plan that this process makes alone."""
    return _context(local_hardware(device), device, optimizer, ranks_per_host)


def _context(
    hardware: Hardware, device: torch.device, optimizer: str | None, ranks_per_host: int
) -> RunContext:
    fbgemm = fbgemm_version(versions())
    return RunContext(device.type, hardware, optimizer, ranks_per_host, fbgemm, CALIBRATED)


def detect_hardware(rank: Rank) -> Hardware:
    """Return the hardware of rank 0 and the job's exchanges; all ranks call it together.

    Rank 0 measures its device while the others wait.
    """
    found = on_rank_zero(lambda: local_hardware(rank.device))
    assert found.probe is not None
    if rank.world_size == 1:
        return dataclasses.replace(found, probe=dataclasses.replace(found.probe, exchange=None))
    known = found.probe.exchange
    if known and known.ranks == (dist.get_world_size(), rank.local_world_size):
        return found
    exchange = measure_exchange(rank.device, ranks_per_host=rank.local_world_size)
    probe = dataclasses.replace(found.probe, exchange=exchange)
    measured = dataclasses.replace(found, probe=probe)
    return on_rank_zero(lambda: _kept(measured))


def local_hardware(device: torch.device) -> Hardware:
    """Return the hardware of this process, with exchanges only if an earlier job measured them."""
    fingerprint = read_fingerprint(device)
    found = Hardware(device_name(device), fingerprint, _cached_probe(fingerprint))
    if found.probe is not None:
        return found
    log.info("measuring the speed of %s for about a second", found.name)
    probe = measure_probe(device)
    release_memory(device)
    return _kept(dataclasses.replace(found, probe=probe))


def release_memory(device: torch.device) -> None:
    """Release the memory of measurements, so that a run reports only its own peak."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    else:
        release_freed_memory()
        forget_peak_memory()


def read_fingerprint(device: torch.device) -> Fingerprint:
    """Return the fingerprint of the hardware that this process computes on."""
    cpu = read_cpu(
        threads=torch.get_num_threads(), torch_capability=torch.backends.cpu.get_cpu_capability()
    )
    return Fingerprint(cpu, read_gpu(device) if device.type == "cuda" else None)


def _cached_probe(fingerprint: Fingerprint) -> Probe | None:
    """Return the probe of this boot; None if there is none, or if it cannot be read."""
    try:
        fields = read_json_object(_cache_path(fingerprint), noun="probe")
        cached = read_form(fields, _CachedProbe, name="the probe", may_have_others=True)
    except UserError:
        return None
    return cached.probe if cached.boot == _boot() else None


def _kept(hardware: Hardware) -> Hardware:
    """Write the probe to the cache, if it can be written; return the hardware.

    A probe that was measured under heavy load is not written, so the next run measures again.
    """
    fingerprint, probe, boot = hardware.fingerprint, hardware.probe, _boot()
    assert fingerprint is not None
    assert probe is not None
    max_per_core = MAX_LOAD_PER_CORE if fingerprint.cpu.threads == 1 else 1
    if boot is not None and probe.load <= max_per_core * fingerprint.cpu.cores:
        path = _cache_path(fingerprint)
        with contextlib.suppress(OSError, UserError):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, {"boot": boot, "probe": probe.to_json()})
    return hardware


def _cache_path(fingerprint: Fingerprint) -> Path:
    return user_cache() / f"probe-{fingerprint.id}.json"


def _boot() -> str | None:
    """Return the id of the machine's current boot; None if it is not known."""
    try:
        return BOOT_ID.read_text().strip() or None
    except OSError:
        return None
