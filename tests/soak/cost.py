"""Time of saving and loading, and how long the loop waits for a checkpoint."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import time
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path

import torch.distributed as dist

from dlrm_sharded.checkpoint.folder import checkpoints
from dlrm_sharded.checkpoint.logical import PART_BYTES
from dlrm_sharded.checkpoint.manifest import check_parts, read_manifest
from dlrm_sharded.checkpoint.model_state import model_state
from dlrm_sharded.checkpoint.restore import load_model
from dlrm_sharded.checkpoint.saver import Saver
from dlrm_sharded.files.text_table import Column, TextTable
from dlrm_sharded.plans.plan import Shard, ShardingPlan
from dlrm_sharded.plans.tables import Table
from dlrm_sharded.ranks.distributed import Rank, process_group
from dlrm_sharded.training.trainer import make_pipeline
from tests.soak.folders import folder_of
from tests.soak.random_plans import batch, sharded
from tests.soak.ranks import run_state, start

NUM_TABLES = 8
DIM = 32
GB = 1e9


@dataclass(frozen=True, slots=True)
class Cost:
    """Times of one repetition, in s.

    Args:
        disk_s: writing as many bytes as the checkpoint has, without anything else.
        save_s, load_s, check_s: saving without the background, loading, and checking the parts.
        stall_s: how long `save` keeps the loop waiting when it writes in the background.
        background_s: from then on until the checkpoint is there, while the loop goes on.
        step_s, slowed_step_s: median step without a save, and beside one in the background.
    """

    size_gb: float
    disk_s: float
    save_s: float
    check_s: float
    load_s: float
    stall_s: float
    background_s: float
    step_s: float
    slowed_step_s: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--gb", type=float, default=1.0, help="size of the tables [%(default)s]")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="decides the disk; by default that of /tmp")


def run(options: argparse.Namespace) -> int:
    with folder_of(options.folder) as folder:
        disk = disk_of(folder)
        start(__file__, options.ranks, str(folder), str(options.gb), str(options.rounds))
        found = [Cost(**fields) for fields in json.loads((folder / "costs.json").read_text())]
    print(f"{options.ranks} ranks, {disk}")
    size = found[0].size_gb
    figures = (
        ("write as many bytes, s/GB", [cost.disk_s / size for cost in found]),
        ("save, s/GB", [cost.save_s / size for cost in found]),
        ("check of the parts, s/GB", [cost.check_s / size for cost in found]),
        ("load, s/GB", [cost.load_s / size for cost in found]),
        ("stall without background, s", [cost.save_s for cost in found]),
        ("stall with background, s", [cost.stall_s for cost in found]),
        ("time in the background, s", [cost.background_s for cost in found]),
        ("step, ms", [1e3 * cost.step_s for cost in found]),
        ("step beside a save, ms", [1e3 * cost.slowed_step_s for cost in found]),
    )
    columns = (Column(title, ".3f") for title in ("median", "least", "most"))
    rows = [(title, statistics.median(ms), min(ms), max(ms)) for title, ms in figures]
    print(TextTable(["figure", *columns], rows).markdown())
    print(f"the checkpoint has {size:.2f} GB")
    return 0


def disk_of(folder: Path) -> str:
    """Return the device and file system of a folder."""
    mounts = [line.split()[:3] for line in Path("/proc/mounts").read_text().splitlines()]
    above = {str(folder.resolve()), *map(str, folder.resolve().parents)}
    device, _, kind = max((m for m in mounts if m[1] in above), key=lambda m: len(m[1]))
    return f"disk {device} with {kind}"


def _main() -> None:
    warnings.filterwarnings("ignore", category=FutureWarning, message=".*deprecat")
    folder, size_gb, rounds = Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
    with process_group(timeout_s=600) as rank:
        costs = _costs(rank, folder, size_gb, rounds)
        if rank.is_zero:
            (folder / "costs.json").write_text(json.dumps([asdict(cost) for cost in costs]))


def _costs(rank: Rank, folder: Path, size_gb: float, rounds: int) -> list[Cost]:
    rows = int(size_gb * GB / (NUM_TABLES * DIM * 4))
    tables = [Table(f"t{i}", rows, DIM, 4.0) for i in range(NUM_TABLES)]
    shards = [Shard.whole(table, i % rank.world_size) for i, table in enumerate(tables)]
    plan = ShardingPlan(rank.world_size, tuple(shards))
    built = sharded(rank, plan, "rowwise_adagrad", tables=tables)
    state = model_state(
        built.model, built.optimizer, plan, tables, embedding_optimizer="rowwise_adagrad"
    )
    steps = make_pipeline("base", built.model, built.optimizer, rank.device)
    stream = itertools.cycle([batch(tables, rank.rank, size=512)])
    savers = {b: Saver(folder / str(b), keep=1, background=b, rank=rank) for b in (False, True)}

    def step_s() -> float:
        begun = time.perf_counter()
        steps.progress(stream)
        return time.perf_counter() - begun

    def timed_s(begun: float) -> float:
        dist.barrier()
        return time.perf_counter() - begun

    costs = []
    for number in range(rounds + 1):
        quiet = [step_s() for _ in range(20)]
        dist.barrier()
        begun = time.perf_counter()
        _write(folder / f"bytes_{rank.rank}", int(size_gb * GB / rank.world_size))
        disk_s = timed_s(begun)
        saved = run_state(rank, plan, state, step=number)
        dist.barrier()
        begun = time.perf_counter()
        savers[False].save(state.tensors, saved)
        save_s = timed_s(begun)
        begun = time.perf_counter()
        savers[True].save(state.tensors, saved)
        stall_s = timed_s(begun)
        # All ranks take equally many steps, as steps are collectives.
        slowed = [step_s() for _ in range(20)]
        savers[True].finish()
        background_s = timed_s(begun) - stall_s
        manifest = read_manifest(checkpoints(folder / "False")[0])
        begun = time.perf_counter()
        check_parts(manifest, share=rank.rank, num_shares=rank.world_size)
        check_s = timed_s(begun)
        begun = time.perf_counter()
        load_model(manifest, state)
        load_s = timed_s(begun)
        if number:  # the first round makes the buffers
            costs.append(
                Cost(
                    size_gb=manifest.size_bytes / GB,
                    disk_s=disk_s,
                    save_s=save_s,
                    check_s=check_s,
                    load_s=load_s,
                    stall_s=stall_s,
                    background_s=background_s,
                    step_s=statistics.median(quiet),
                    slowed_step_s=statistics.median(slowed),
                )
            )
    for saver in savers.values():
        saver.close()
        if saver.failure is not None:
            raise RuntimeError(saver.failure)
    return costs


def _write(path: Path, size_bytes: int) -> None:
    """Write a file to disk in blocks of the size of a part."""
    content = bytes(PART_BYTES)
    with path.open("wb") as file:
        for start in range(0, size_bytes, PART_BYTES):
            file.write(content[: size_bytes - start])
        file.flush()
        os.fsync(file.fileno())
    path.unlink()


if __name__ == "__main__":
    _main()
