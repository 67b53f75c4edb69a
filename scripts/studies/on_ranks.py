"""Rows that all ranks of a job on this machine make together, and loops compared within it."""

from __future__ import annotations

import importlib
import json
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from studies.processes import module_command, quiet, run_python
from studies.study import Row

Loop = Callable[[], object]


def rows_on_ranks(module: str, num_ranks: int, **settings: Any) -> list[Row]:
    """Return the rows of the function `rows_on_rank` of a module, called on each rank of a job.

    A job ends the threads of its groups of ranks, which would wake up now and then.

    Args:
        settings: keyword arguments of the function, which are JSON.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.json"
        command = module_command("torch.distributed.run", "--standalone")[1:]
        command += [f"--nproc-per-node={num_ranks}", "-m", __name__]
        run_python(*command, module, json.dumps(settings), str(out))
        rows: list[Row] = json.loads(out.read_text())
    return rows


def compared_loops(loops: dict[str, Loop], rank: Any, *, steps: int, rounds: int) -> list[Row]:
    """Return the time of a step of each loop in interleaved rounds, [rounds].

    Args:
        loops: by name; each takes so many steps.
    """
    for loop in loops.values():
        loop()
    step_ms: dict[str, list[float]] = {name: [] for name in loops}
    for i in range(rounds):
        # Every loop is first and last in turn, so that none gains from the order.
        for name in sorted(loops, reverse=bool(i % 2)):
            step_ms[name].append(1e3 * _timed(loops[name], rank) / steps)
    return [{"loop": name, "step_ms": found, "steps": steps} for name, found in step_ms.items()]


def _timed(loop: Loop, rank: Any) -> float:
    """Return the seconds that a loop takes on all ranks."""
    import torch
    import torch.distributed as dist

    dist.barrier()
    started = time.perf_counter()
    loop()
    if rank.device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()
    return time.perf_counter() - started


def main(module: str, settings: str, out: str) -> None:
    """Run one rank; rank 0 writes the rows."""
    from dlrm_sharded.ranks.distributed import process_group

    warnings.simplefilter("ignore")
    quiet()
    part = importlib.import_module(module)  # libraries load before the ranks meet
    with process_group() as rank:
        rows = part.rows_on_rank(rank, **json.loads(settings))
        if rank.is_zero:
            Path(out).write_text(json.dumps(rows))


if __name__ == "__main__":
    main(*sys.argv[1:])
