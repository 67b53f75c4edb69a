"""Compare sharders, and this trainer with a plain TorchRec script; print the tables.

python scripts/benchmark.py plans    dlrm-compare on presets and task sets
python scripts/benchmark.py plain    steps of the trainer and of a plain TorchRec script, in turns
python scripts/benchmark.py host     CPU time of a step on the host, here and in TorchRec's pipeline

plans passes arguments with "=" to dlrm-compare: plans --sets paper num=20 sharders=[dim,torchrec].
plain trains a DLRM with both; host trains MLPerf's DLRM-DCNv2 with the smallest tensors, and on a
CPU stands for the host of a GPU without its launches, streams and page-locked copies.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import logging
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import LambdaLR
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

from dlrm_sharded.files.text_table import Column, TextTable
from dlrm_sharded.ranks.distributed import Rank, process_group
from dlrm_sharded.training.pipeline import CLASSES
from dlrm_sharded.training.trainer import Trainer, TrainerConfig
from models import FULL, OPTIMIZER, TINY, our_training, plain_training, stream

PRESETS = Path(__file__).resolve().parents[1] / "conf" / "preset"
SETS = ("paper", "feasibility", "scale_whole", "models")
PLAIN, OURS = "TorchRec", "dlrm_sharded"
NUM_BATCHES = 4
WARMUP_STEPS, PROFILED_STEPS = 5, 3
NO_WORK = ("aten::empty", "aten::new_empty", "aten::resize_", "aten::set_", "aten::detach_")
"""Operators that allocate memory or make views, although their schemas do not show it."""


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
    dataset = FULL.batches(batch_size, steps)
    model, optimizer = plain_training(FULL, rank, batch_size)
    trained, our_optimizer = our_training(FULL, rank, batch_size)

    def train_plainly() -> None:
        pipeline = TrainPipelineSparseDist(model, optimizer, rank.device)
        batches = stream(dataset, rank)
        for _ in range(steps):
            pipeline.progress(batches)
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
    wait_for(rank)
    dist.barrier()
    return time.perf_counter() - started


def wait_for(rank: Rank) -> None:
    if rank.device.type == "cuda":
        torch.cuda.synchronize()


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


def host(rank: Rank, *, batch_size: int, steps: int, rounds: int, compile_mode: str | None) -> str:
    """Measure the CPU time of a step of each pipeline in interleaved rounds; return their table."""
    options: dict[str, dict[str, Any]] = {OURS: {}, "dense graph": {"dense_graph": True}}
    if compile_mode:
        options[f"compiled {compile_mode}"] = {"compile_mode": compile_mode}
    pipelines: dict[str, Any] = {
        PLAIN: TrainPipelineSparseDist(*plain_training(TINY, rank, batch_size), rank.device)
    }
    for name, of_model in options.items():
        training = our_training(TINY, rank, batch_size, "size_lookup", **of_model)
        pipelines[name] = CLASSES["sparse_dist"](*training, rank.device)
    batches = itertools.cycle(list(stream(TINY.batches(batch_size, NUM_BATCHES), rank)))
    loops = {
        name: functools.partial(cpu_ms, pipeline, batches, steps, rank)
        for name, pipeline in pipelines.items()
    }
    times = interleaved(loops, rounds, lambda loop: loop())
    figures = {}
    for name, pipeline in pipelines.items():
        calls = np.full((rounds, 1), calls_of(pipeline, batches))
        figures[name] = np.hstack([np.array(times[name]), calls])
    return table_of(figures, ("main thread, ms", "process, ms", "operators"))


def cpu_ms(pipeline: Any, batches: Any, steps: int, rank: Rank) -> tuple[float, float]:
    """Return the CPU time of a step, in ms: of the main thread, and of all threads of the process.

    A separate thread launches the backward pass on a GPU. Waiting takes no CPU time.
    """
    for _ in range(WARMUP_STEPS):
        pipeline.progress(batches)
    dist.barrier()
    main_s, process_s = time.thread_time(), time.process_time()
    for _ in range(steps):
        pipeline.progress(batches)
    main_s, process_s = time.thread_time() - main_s, time.process_time() - process_s
    wait_for(rank)
    return 1e3 * main_s / steps, 1e3 * process_s / steps


def calls_of(pipeline: Any, batches: Any) -> float:
    """Return the number of operators in a step that compute or move data, without nested ones."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        for _ in range(PROFILED_STEPS):
            pipeline.progress(batches)
    events = profiler.events() or ()
    leaves = [e for e in events if works(e.name) and not any(map(works, names_below(e)))]
    return len(leaves) / PROFILED_STEPS


def names_below(event: Any) -> Iterator[str]:
    for child in event.cpu_children:
        yield child.name
        yield from names_below(child)


@functools.cache
def works(name: str) -> bool:
    """Return whether a profiler event is an operator other than a view or an allocation."""
    namespace, _, operator = name.partition("::")
    packet = getattr(getattr(torch.ops, namespace, None), operator, None) if operator else None
    if not isinstance(packet, torch._ops.OpOverloadPacket) or name.startswith(NO_WORK):
        return False
    overload = getattr(packet, packet.overloads()[0])
    aliases = [returned.alias_info for returned in overload._schema.returns]
    return all(alias is None or alias.is_write for alias in aliases)


def on_ranks(options: argparse.Namespace) -> int:
    """Run a part on ranks on this machine; rank 0 prints its table."""
    if "RANK" not in os.environ:
        os.environ |= {
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
            "TQDM_DISABLE": "1",
        }
        ranks = ["--nproc-per-node", str(options.ranks)]
        return run_modules([["dlrm_sharded.ranks.torchrun", *ranks, *sys.argv]])
    warnings.simplefilter("ignore")
    logging.getLogger("dlrm_sharded").setLevel(logging.ERROR)
    shared = {key: getattr(options, key) for key in ("batch_size", "steps", "rounds")}
    with process_group() as rank:
        if options.part == "plain":
            table = plain(rank, **shared)
        else:
            table = host(rank, **shared, compile_mode=options.compile_mode)
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
    timed = {"plain": (2048, 12, 24), "host": (64, 40, 12)}
    for name, (batch_size, steps, rounds) in timed.items():
        part = parts.add_parser(name, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
        part.add_argument("--ranks", type=int, default=2, help="ranks of a run")
        part.add_argument("--batch-size", type=int, default=batch_size, help="of all ranks")
        part.add_argument("--steps", type=int, default=steps, help="of one loop in one round")
        part.add_argument("--rounds", type=int, default=rounds, help="at least 1")
        if name == "host":
            part.add_argument("--compile-mode", help="of one more loop")
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
