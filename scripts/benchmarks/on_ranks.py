"""Starts a part of the benchmark as ranks of a job, and compares loops within it."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist

from dlrm_sharded.ranks.distributed import Rank
from studies.processes import run_ranks

Loop = Callable[[], None]


def add_arguments(parser: argparse.ArgumentParser, *, steps: int, rounds: int) -> None:
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument(
        "--steps", type=int, default=steps, help="steps of one loop in one round [%(default)s]"
    )
    parser.add_argument("--rounds", type=int, default=rounds)


def start(script: str, options: argparse.Namespace, *arguments: str) -> None:
    """Run a script as ranks; its arguments are the numbers of steps and rounds, then others."""
    run_ranks(script, options.ranks, str(options.steps), str(options.rounds), *arguments)


def compare(loops: dict[str, Loop], rank: Rank, *, steps: int, rounds: int) -> None:
    """Print the time of each loop relative to the first one, in interleaved rounds.

    Args:
        loops: by name; each takes so many steps.
    """
    for loop in loops.values():
        loop()
    first = next(iter(loops))
    ratios: dict[str, list[float]] = {name: [] for name in loops if name != first}
    for i in range(rounds):
        # Every loop is first and last in turn, so that none gains from the order.
        order = sorted(loops, reverse=bool(i % 2))
        step_ms = {name: 1e3 * timed(loops[name], rank) / steps for name in order}
        for name, found in ratios.items():
            found.append(step_ms[name] / step_ms[first])
        if rank.is_zero:
            print(", ".join(f"{name} {ms:.2f} ms a step" for name, ms in step_ms.items()))
    if not rank.is_zero:
        return
    for name, found in ratios.items():
        low, median, high = np.percentile(found, [25, 50, 75])
        print(
            f"{name} / {first}: median {median:.4f}, quartiles {low:.4f} to {high:.4f}, "
            f"{rounds} rounds of {steps} steps",
            flush=True,
        )


def timed(loop: Loop, rank: Rank) -> float:
    """Return the seconds that a loop takes on all ranks."""
    dist.barrier()
    started = time.perf_counter()
    loop()
    if rank.device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()
    return time.perf_counter() - started
