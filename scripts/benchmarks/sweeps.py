"""What sweeps tell apart: planted differences, slow hosts and bursts, in rounds and apart.

One sweep has all experiments of a kind: in rounds, disjoint blocks of its rounds; of jobs apart,
the jobs of one seed. The kind `separate` checks that by a sweep of its own for each experiment.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from benchmarks.planted_model import SLOW_HOST, SLOW_HOSTS, WAITS, tables
from dlrm_sharded.files.json_files import read_json_object, write_json
from dlrm_sharded.files.text_table import Column, TextTable
from dlrm_sharded.plans.plan import ShardingPlan
from dlrm_sharded.plans.task import ShardingTask, Topology
from dlrm_sharded.runs.paired import CONFIDENCE, least_pairs, paired_ratio
from dlrm_sharded.runs.rounds import read_rounds
from studies.parts import option
from studies.processes import SCRIPTS, module_command, tied_command
from studies.study import Case, Row

BASIS = "measured"
PLANTED = {"first": 0.0, "mirrored": 0.0, "waits_5": 0.05, "waits_10": 0.1, "waits_15": 0.15}
"""Share of a step that one rank waits. All but the first have its plan with ranks exchanged.

The step is lengthened by less, as ranks wait for each other anyway; all rounds tell by how much.
"""

SLOW = 0.2
"""Share of a step that a slow host adds."""

NOTICED = 0.02
"""Difference of two jobs apart that a reader of their table takes for one."""

BURST_S = 3.0
BATCH_SIZE = 1024
KINDS = ("quiet", "slow host", "bursts", "separate", "apart", "apart, slow hosts", "apart, bursts")
OPTIONS = {
    "kinds": option(KINDS, "what is planted", choices=KINDS),
    "plans": option(tuple(PLANTED)[1:], "what the first is compared with", choices=PLANTED),
    "experiments": option(20, "experiments of a kind"),
    "rounds": option(10, "rounds of an experiment"),
    "steps": option(30, "steps of a measurement"),
}
SIZES = [
    *("model._target_=benchmarks.planted_model.waiting_dlrm", "sharder=plan_file"),
    *("data.tables._target_=benchmarks.planted_model.tables", f"batch_size={BATCH_SIZE}"),
    *("data.num_train_batches=12", "data.num_val_batches=1", "data.cache_batches=12"),
    *("trainer.num_warmup_steps=3", "trainer.checkpoint.every_s=null", "trainer.num_epochs=99"),
    *("measure.iterations=3", "measure.warmup=1", "measure.num_batches=1", "journal=none"),
]


def cases(options: argparse.Namespace) -> Iterator[Case]:
    for kind in options.kinds:
        yield Case(kind, functools.partial(_rows, kind, options))


def _rows(kind: str, options: argparse.Namespace) -> list[Row]:
    """Return the throughputs of each plan in each experiment of a kind, [rounds]."""
    num, rounds, began = options.experiments, options.rounds, time.perf_counter()
    is_apart, names = kind.startswith("apart"), ["first", *options.plans]
    waits = dict.fromkeys([*PLANTED, SLOW_HOST, SLOW_HOSTS], 0.0)
    run = functools.partial(_throughputs, steps=options.steps)
    [[speeds]] = run(["first"], waits, rounds=5).values()
    step_ms = 1e3 * BATCH_SIZE / float(np.median(speeds))
    waits |= {name: share * step_ms for name, share in PLANTED.items()}
    waits |= {host: SLOW * step_ms for host in (SLOW_HOST, SLOW_HOSTS) if kind.endswith(host)}
    if is_apart:
        found = run(names, waits, seeds=num, burst_every=3 if "bursts" in kind else 0)
    elif kind == "separate":
        sweeps = [run(names, waits, rounds=rounds) for _ in range(num)]
        found = {name: [sweep[name][0] for sweep in sweeps] for name in names}
    else:
        one = run(names, waits, rounds=num * rounds, burst_every=rounds * ("bursts" in kind))
        found = {name: np.reshape(one[name][0], (num, rounds)).tolist() for name in names}
    shared = {"kind": kind, "step_ms": step_ms, "seconds": time.perf_counter() - began}
    return [
        shared | {"plan": name, "wait_ms": waits[name], "samples_per_s": found[name]}
        for name in names
    ]


def _throughputs(
    names: Sequence[str],
    waits: dict[str, float],
    *,
    steps: int,
    rounds: int = 0,
    seeds: int = 1,
    burst_every: int = 0,
) -> dict[str, list[list[float]]]:
    """Run a sweep; return the throughputs of each plan, [seeds, rounds].

    Args:
        rounds: 0 for jobs apart, each of which has one figure.
        burst_every: number of rounds, or of jobs, with one burst of load; 0 for no bursts.
    """
    with tempfile.TemporaryDirectory() as made:
        folder, sizes = Path(made), list(SIZES)
        task = ShardingTask(tables(), Topology(2, 2**30), BATCH_SIZE)
        for name in names:
            ranks = [(i + (name != "first")) % 2 for i in range(len(task.tables))]
            write_json(folder / f"{name}.json", ShardingPlan.from_ranks(task, ranks).to_json())
        if rounds:
            sizes += [f"hydra.launcher.rounds={rounds}", f"round_steps={steps}"]
        command = [
            *(*module_command("dlrm_sharded.train", "-m"), *sizes, "hydra.launcher.j=1x2"),
            *(f"trainer.num_steps={3 + (5 if rounds else steps)}", f"hydra.sweep.dir={folder}"),
            "seed=" + ",".join(map(str, range(seeds))),
            "sharder.path=" + ",".join(str(folder / f"{name}.json") for name in names),
        ]
        env = {"OMP_NUM_THREADS": "1", **os.environ, WAITS: json.dumps(waits)}
        env["PYTHONPATH"] = os.pathsep.join([str(SCRIPTS), *sys.path])
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(tied_command(command), env=env, stdout=log, stderr=log)
            _burst_until_end(
                process, folder, "plan_file_0/rounds.jsonl" if rounds else "", burst_every
            )
        if process.returncode:
            end = (folder / "log").read_text(errors="replace")[-2000:]
            raise RuntimeError(f"{' '.join(command)} failed:\n{end}")
        found: dict[str, list[list[float]]] = {name: [] for name in names}
        for job in read_json_object(folder / "sweep.json", noun="sweep")["jobs"]:
            overrides = dict(item.split("=", 1) for item in job["overrides"])
            found[Path(overrides["sharder.path"]).stem].append(_figures(folder / job["folder"]))
    return found


def _figures(run: Path) -> list[float]:
    """Return the throughputs of a run in its rounds, or in its training."""
    rounds = read_rounds(run)
    if rounds:
        return [rounds[number].samples_per_s for number in sorted(rounds)]
    return [float(read_json_object(run / "result.json", noun="result")["samples_per_s"])]


def _burst_until_end(
    process: subprocess.Popen[bytes], folder: Path, rounds: str, every: int
) -> None:
    """Wait for the end of a sweep, with a burst of load in the middle of so many rounds or jobs."""
    num_bursts = 0
    while process.poll() is None:
        time.sleep(0.2)
        if rounds:
            path = folder / rounds
            num = path.read_text().count('"attempt": 0') if path.exists() else 0
        else:
            num = len(list(folder.glob("plan_file_*/plan.json")))
        if every and num > every * num_bursts + every // 2:
            num_bursts += 1
            spin = f"import time\nend = time.time() + {BURST_S}\nwhile time.time() < end: pass"
            for busy in [subprocess.Popen([sys.executable, "-c", spin]) for _ in range(2)]:
                busy.wait()


def report(rows: Sequence[Row], reference: str | None) -> str:
    """Write how often each other plan is told from the first, slower or wrongly faster."""
    lines = []
    for kind in dict.fromkeys(row["kind"] for row in rows):
        first, *others = (row for row in rows if row["kind"] == kind)
        for other in others:
            pairs = list(zip(first["samples_per_s"], other["samples_per_s"], strict=True))
            found = (other.get("wait_ms"), *_counts(kind, pairs))  # older rows have no wait
            lines.append((kind, first["step_ms"], other["plan"], *found))
    columns: list[Column | str] = [
        *("kind", Column("step, ms", ".1f"), "against the first"),
        *(Column("wait, ms", ".2f"), "experiments", "told slower"),
        *("told faster", "tie", "rounds to tell", "all rounds"),
    ]
    text = (
        f"In rounds, a plan is told slower or faster by its {100 * CONFIDENCE:.0f} % interval; of "
        f"jobs apart, if it differs by more than {100 * NOTICED:g} %, as a reader would."
    )
    return f"{text}\n\n{TextTable(columns, lines).markdown()}"


def _counts(kind: str, pairs: Sequence[tuple[list[float], list[float]]]) -> tuple[object, ...]:
    """Return the columns of `report` after the name of the plan."""
    slower = faster = 0
    needed = []
    for first, other in pairs:
        found = paired_ratio(first, other)
        is_tie = abs(found.ratio - 1) < NOTICED if kind.startswith("apart") else found.is_tie
        slower += not is_tie and found.ratio > 1
        faster += not is_tie and found.ratio < 1
        least = least_pairs(CONFIDENCE)
        needed += [
            n for n in range(least, len(first) + 1) if not paired_ratio(first[:n], other[:n]).is_tie
        ][:1]
    median = f"{np.median(needed):.0f}" if needed else "-"
    every = [list(itertools.chain.from_iterable(figures)) for figures in zip(*pairs, strict=True)]
    whole = paired_ratio(*every)
    return (
        len(pairs),
        slower,
        faster,
        len(pairs) - slower - faster,
        median,
        f"{whole.ratio:.3f} ({whole.low:.3f} to {whole.high:.3f})",
    )
