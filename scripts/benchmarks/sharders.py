"""Embedding cost and throughput under every sharder, several seeds, interleaved."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
SHARDERS = ["random", "size", "dim", "lookup", "size_lookup", "torchrec_blind", "torchrec"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--sharders", nargs="+", default=SHARDERS)
    parser.add_argument("--out", type=Path, help="keep the runs here, for TensorBoard")
    parser.add_argument("overrides", nargs="*", help="Hydra overrides, after --")


def run(options: argparse.Namespace) -> None:
    """One run per sharder and seed; all sharders of one seed before the next seed."""
    out = options.out or Path(tempfile.mkdtemp(prefix="sharders-"))
    results: dict[str, list[dict[str, Any] | None]] = {name: [] for name in options.sharders}
    for seed in range(options.seeds):
        for sharder in options.sharders:
            run_dir = out / f"{sharder}_seed{seed}"
            result = train(
                run_dir, options.ranks, [f"sharder={sharder}", f"seed={seed}", *options.overrides]
            )
            results[sharder].append(result)
            print(f"seed {seed} {sharder:14} {describe(result)}", flush=True)
    print(table(results))
    print(f"runs in {out}")


def train(run_dir: Path, ranks: int, overrides: list[str]) -> dict[str, Any] | None:
    """The run's result.json; None where it failed."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", str(ranks), "-m", "dlrm_sharded.train"),
            *(f"hydra.run.dir={run_dir.resolve()}", *overrides),
        ],
        cwd=ROOT,
        env={"OMP_NUM_THREADS": "1", **os.environ},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        print(done.stderr[-2000:])
        return None
    fields: dict[str, Any] = json.loads((run_dir / "result.json").read_text())
    return fields


def describe(result: dict[str, Any] | None) -> str:
    if result is None:
        return "failed"
    return (
        f"{result['embedding_cost_ms']:7.1f} ms cost, {result['samples_per_s']:9,.0f} samples/s, "
        f"imbalance {result['imbalance']:.2f}"
    )


def table(results: dict[str, list[dict[str, Any] | None]]) -> str:
    """Mean and range over the runs that succeeded, and the mean of gains within each seed."""
    lines = [
        "| sharder | embedding cost, ms | critical path, ms | imbalance | samples/s "
        "| against random | runs |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, runs in results.items():
        good = [run for run in runs if run is not None]
        if not good:
            lines.append(f"| {name} | - | - | - | - | - | 0 / {len(runs)} |")
            continue
        gains = [
            run["samples_per_s"] / base["samples_per_s"] - 1
            for run, base in zip(runs, results.get("random", []), strict=False)
            if run is not None and base is not None
        ]
        gain = f"{100 * np.mean(gains):+.1f} %" if gains else "-"
        cells = [
            spread([run[key] for run in good], digits)
            for key, digits in (
                ("embedding_cost_ms", 1),
                ("critical_path_ms", 1),
                ("imbalance", 2),
                ("samples_per_s", 0),
            )
        ]
        lines.append(f"| {name} | {' | '.join(cells)} | {gain} | {len(good)} / {len(runs)} |")
    return "\n".join(lines)


def spread(values: list[float], digits: int) -> str:
    return f"{np.mean(values):,.{digits}f} ({min(values):,.{digits}f} to {max(values):,.{digits}f})"
