"""Predicted against measured costs of plans that no model was fitted to: tables and pictures."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from torch.utils.tensorboard import SummaryWriter

from dlrm_sharded.calibration.calibrate import FitConfig, fit_learned, predictor
from dlrm_sharded.calibration.costs_file import read_costs
from dlrm_sharded.calibration.evaluate import (
    MORE_SHARDS,
    SHARD_COUNTS,
    Predictor,
    TimePairs,
    averaged,
    compare,
    compare_attempts,
    errors_table,
)
from dlrm_sharded.calibration.samples import CollectedCosts, Sample
from dlrm_sharded.cost.learned import learned_cost_model
from dlrm_sharded.cost.neuroshard_paper import paper_cost_model
from dlrm_sharded.files.errors import UserError
from dlrm_sharded.hardware.context import RunContext

HELD_OUT = (
    "collect.seed=1",
    "collect.num_samples=75",
    "collect.repeat_every=1",
    "collect.num_repeats=3",
    "collect.time_budget_s=240",
)
"""Overrides that collect 75 other plans, each measured 4 times, 100 measurements apart."""

PICTURES = {"computation": "shard", "communication": "communication, "}
"""Names of the pictures, and the text that their parts have in their names."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--costs", type=Path, help="collected costs of held-out plans; measured now by default"
    )
    parser.add_argument(
        "--fitted-on",
        type=Path,
        help="also test a model that is fitted to only the smaller groups in this file",
    )
    parser.add_argument("--artifact", help="file of a model; by default, that of this hardware")
    parser.add_argument("--pictures", type=Path, default=Path("docs"))
    parser.add_argument("--logdir", type=Path, default=Path("runs/benchmark_costs"))


def run(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory(prefix="costs-") as folder:
        costs = read_costs(options.costs or _measure(Path(folder) / "held_out.parquet"))
    hardware, device = costs.hardware, costs.manifest["device"]
    context = RunContext(device=device, hardware=hardware)
    model = learned_cost_model(context, options.artifact)
    print(f"{hardware.name}; load average {costs.manifest['load_average']}")
    learned = _report("learned", predictor(model), costs)
    try:
        paper = paper_cost_model(context)
        _report("neuroshard_paper", paper.predict_workload, costs)
    except UserError as error:
        print(f"\nno comparison with neuroshard_paper: {error}")
    _print("measured again (one measurement against another)", compare_attempts(costs.samples))
    if options.fitted_on:
        _report_larger(options.fitted_on, costs)
    options.pictures.mkdir(parents=True, exist_ok=True)
    with SummaryWriter(str(options.logdir)) as writer:
        for name, kind in PICTURES.items():
            parts = {part: pairs for part, pairs in learned.items() if kind in part}
            if not parts:
                continue
            figure = scatter(parts)
            figure.savefig(options.pictures / f"costs_{name}.png", dpi=110)
            writer.add_figure(f"costs/{name}", figure)
        writer.add_text("costs/errors", errors_table(_summaries(learned)))


def _measure(out: Path) -> Path:
    collect = [sys.executable, "-m", "dlrm_sharded.commands.collect_costs"]
    subprocess.run([*collect, f"out={out}", *HELD_OUT], check=True)
    return out


def _report(name: str, predict: Predictor, costs: CollectedCosts) -> dict[str, TimePairs]:
    pairs = compare(predict, averaged(costs.samples))
    _print(name, pairs)
    return pairs


def _report_larger(fitted_on: Path, costs: CollectedCosts) -> None:
    """Fit a model to groups of at most 40 shards, and report how it predicts larger groups."""
    most = max(high for _, high in SHARD_COUNTS.values())
    fit_costs = read_costs(fitted_on)
    small = [sample for sample in fit_costs.samples if _largest_group(sample) <= most]
    model = fit_learned(small, fit_costs.manifest, FitConfig())
    large = [sample for sample in costs.samples if _largest_group(sample) > most]
    all_pairs = compare(predictor(model), averaged(large))
    larger = {name: pairs for name, pairs in all_pairs.items() if MORE_SHARDS in name}
    _print(f"fitted to groups of at most {most} shards", larger)


def _largest_group(sample: Sample) -> int:
    return int(np.bincount([shard.rank for shard in sample.shards]).max())


def _print(name: str, pairs: dict[str, TimePairs]) -> None:
    print(f"\n{name}:\n\n{errors_table(_summaries(pairs))}", flush=True)


def _summaries(pairs_by_name: dict[str, TimePairs]) -> dict[str, dict[str, float]]:
    return {name: pairs.summary() for name, pairs in pairs_by_name.items()}


def scatter(pairs_by_name: dict[str, TimePairs]) -> Figure:
    """Draw predicted against measured times on log scales, with the diagonal."""
    figure = Figure(figsize=(6, 5.4), layout="constrained")
    axes = figure.subplots()
    everything: Sequence[float] = [t for pairs in pairs_by_name.values() for t in pairs.measured]
    ends = (0.8 * min(everything), 1.25 * max(everything))
    axes.plot(ends, ends, color="0.6", linewidth=1)
    for name, pairs in pairs_by_name.items():
        mape = pairs.summary()["mape"]
        axes.scatter(pairs.measured, pairs.predicted, s=12, label=f"{name}: {mape:.1f} %")
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
    axes.set(xlabel="measured, ms", ylabel="predicted, ms")
    axes.legend(fontsize=8, title="mean absolute error", title_fontsize=8)
    return figure
