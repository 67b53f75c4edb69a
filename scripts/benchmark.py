"""Compare sharders, and this trainer with a plain TorchRec script; print the tables.

python scripts/benchmark.py plans    dlrm-compare on presets and task sets
python scripts/benchmark.py plain    steps of the trainer and of a plain TorchRec script, in turns

plans passes arguments with "=" to dlrm-compare: plans --sets paper num=20 sharders=[dim,torchrec].
"""

from __future__ import annotations

import argparse
import logging
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import LambdaLR
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

from dlrm_sharded.files.text_table import Column, TextTable
from dlrm_sharded.ranks.distributed import Rank, process_group
from dlrm_sharded.training.trainer import Trainer, TrainerConfig
from models import OPTIMIZER, batches, our_training, plain_training, stream

PRESETS = Path(__file__).resolve().parents[1] / "conf" / "preset"
SETS = ("paper", "feasibility", "scale_whole", "models")
PLAIN, OURS = "TorchRec", "dlrm_sharded"


def compare_commands(sets: Sequence[str], out: Path, overrides: Sequence[str]) -> list[list[str]]:
    """Return a command for each preset or task set; its results are in a folder below `out`."""
    keys = {path.stem: "preset" for path in PRESETS.glob("*.yaml")}
    module = "dlrm_sharded.commands.compare"
    return [
        [module, f"{keys.get(name, 'task_set')}={name}", f"out={out / name}", *overrides]
        for name in sets
    ]


def run_modules(commands: Sequence[Sequence[str]]) -> int:
    """Run Python modules one after another, and return the first exit code that is not 0."""
    codes = [subprocess.run([sys.executable, "-m", *words]).returncode for words in commands]
    return next(filter(None, codes), 0)


def plain(rank: Rank, *, batch_size: int, steps: int, rounds: int) -> str:
    """Time loops of TorchRec and of the trainer in interleaved rounds; return their table."""
    dataset = batches(batch_size, steps)
    model, optimizer = plain_training(rank, batch_size)
    trained, our_optimizer = our_training(rank, batch_size)

    def train_plainly() -> None:
        pipeline = TrainPipelineSparseDist(model, optimizer, rank.device)
        of_rank = stream(dataset, rank)
        for _ in range(steps):
            pipeline.progress(of_rank)
        pipeline.detach()

    def train() -> None:
        Trainer(
            trained,
            optimizer=our_optimizer,
            lr_scheduler=LambdaLR(our_optimizer, OPTIMIZER.schedule.factor),
            train_stream=stream(dataset, rank),
            eval_stream=stream(dataset, rank, "val"),
            config=TrainerConfig(num_steps=steps),
            batch_size=batch_size,
            rank=rank,
            log_scalar=lambda *_: None,
        ).run()

    loops = {PLAIN: train_plainly, OURS: train}
    times = interleaved(loops, rounds, lambda loop: seconds_of(loop, rank))
    step_ms = {name: 1e3 * np.array(found) / steps for name, found in times.items()}
    figures = {name: np.stack([ms, 1e3 * batch_size / ms], 1) for name, ms in step_ms.items()}
    return table_of(figures, ("step, ms", "samples/s"))


def seconds_of(loop: Callable[[], object], rank: Rank) -> float:
    """Return the time that a loop takes on all ranks."""
    dist.barrier()
    started = time.perf_counter()
    loop()
    if rank.device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()
    return time.perf_counter() - started


def interleaved(
    loops: Mapping[str, Any], rounds: int, measure: Callable[[Any], Any]
) -> dict[str, list[Any]]:
    """Measure each loop once a round; the first round warms up.

    Each loop is first and last in turn, so that none gains from the order.
    """
    found: dict[str, list[Any]] = {name: [] for name in loops}
    for number in range(rounds + 1):
        for name in sorted(loops, reverse=bool(number % 2)):
            measured = measure(loops[name])
            if number:
                found[name].append(measured)
    return found


def table_of(figures: Mapping[str, np.ndarray], titles: Sequence[str]) -> str:
    """Return a table of the medians of figures [rounds, titles], the first also over TorchRec's."""
    rows = []
    for name, found in figures.items():
        low, median, high = np.percentile(found[:, 0] / figures[PLAIN][:, 0], [25, 50, 75])
        ratio = f"{median:.3f} ({low:.3f} to {high:.3f})"
        rows.append((name, *np.median(found, axis=0), ratio))
    columns = (Column(title, ",.2f") for title in titles)
    return TextTable(["loop", *columns, f"{titles[0]}: over {PLAIN}'s"], rows).markdown()


def on_ranks(options: argparse.Namespace) -> int:
    """Run `plain` on ranks on this machine; rank 0 prints its table."""
    if "RANK" not in os.environ:
        os.environ |= {
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
            "TQDM_DISABLE": "1",
        }
        ranks = ["--nproc-per-node", str(options.ranks)]
        return run_modules([["dlrm_sharded.ranks.torchrun", *ranks, *sys.argv]])
    warnings.simplefilter("ignore")
    logging.getLogger("dlrm_sharded").setLevel(logging.ERROR)
    sizes = {key: getattr(options, key) for key in ("batch_size", "steps", "rounds")}
    with process_group() as rank:
        table = plain(rank, **sizes)
        if rank.is_zero:
            load = ", ".join(f"{x:.2f}" for x in os.getloadavg())
            print(
                f"{rank.world_size} ranks on {rank.device.type}, batch {options.batch_size:,}; "
                f"{options.rounds} rounds of {options.steps} steps; {os.cpu_count()} cores, "
                f"load average {load}\n\n{table}"
            )
    return 0


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Read the command line; `overrides` has the arguments for dlrm-compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = parser.add_subparsers(dest="part", required=True)
    plans = parts.add_parser("plans")
    plans.add_argument("--sets", type=lambda text: text.split(","), default=SETS)
    plans.add_argument("--out", type=Path, default=Path("comparison"))
    loops = parts.add_parser("plain", formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    loops.add_argument("--ranks", type=int, default=2, help="ranks of a run")
    loops.add_argument("--batch-size", type=int, default=2048, help="of all ranks")
    loops.add_argument("--steps", type=int, default=12, help="of one loop in one round")
    loops.add_argument("--rounds", type=int, default=24, help="at least 1")
    options, overrides = parser.parse_known_args(words)
    if wrong := [word for word in overrides if "=" not in word or options.part != "plans"]:
        parser.error(f"unknown arguments: {' '.join(wrong)}")
    options.overrides = overrides
    return options


def main() -> int:
    options = parse(sys.argv[1:])
    if options.part == "plans":
        return run_modules(compare_commands(options.sets, options.out, options.overrides))
    return on_ranks(options)


if __name__ == "__main__":
    sys.exit(main())
