"""The whole benchmark: studies in a folder, from whose rows docs/benchmark.md is written."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch

from benchmarks.page import REFERENCE, write_page
from benchmarks.planners import planner_of
from dlrm_sharded.cost.base import standing_of
from dlrm_sharded.files.provenance import commit, device_name, versions
from dlrm_sharded.hardware.detect import local_hardware
from dlrm_sharded.ranks.devices import device_type
from studies.command_line import run_in
from studies.study import Commands, Study

LIMIT_S = 7200.0
"""Time of a study, which none needs: the whole benchmark takes half an hour."""

SEED = "--seed 2026"
"""Seed of the tasks, which is not that of any task that a policy was trained on."""

OTHERS = (
    "--sharders neuroshard neuroshard_paper torchrec hugectr embark autoshard dreamshard "
    "size_lookup lookup dim size random"
)
ALL = f"{OTHERS} torchrec_calibrated torchrec_blind torchrec_dp"
"""All sharders. Three share TorchRec's search: where it takes long, torchrec stands for them."""

MEASURED = (
    "--iterations 6 --sharders neuroshard neuroshard_paper torchrec torchrec_calibrated autoshard "
    "dreamshard size_lookup dim random"
)
A100, H100 = "--gpu a100_sxm_80gb", "--gpu h100_sxm"
PLANS, FEASIBILITY = f"plans {SEED} --limit-s 30 --set", "feasibility --numbers 0"
PRODUCTION = f"plans {SEED} --limit-s 150 --set production {A100} {OTHERS} --sizes"
TABLES, RANKS = "10x10 100x32 1000x32", "1000x2 1000x8 1000x128"


def _study(name: str, title: str, commands: Commands, small: Commands, about: str = "") -> Study:
    return Study(name, LIMIT_S, 0.0, commands=commands, small=small, title=title, about=about)


STUDIES = (
    _study(
        "planned",
        "Plans",
        (
            f"{PLANS} paper --num 8 {ALL}",
            f"{PLANS} {FEASIBILITY} 1 9 10 11 12 13 14 16 17 18 {OTHERS}",
            f"{PLANS} models --num 9 {OTHERS}",
            f"{PLANS} scale --num 2 {OTHERS}",
            f"{PLANS} paper --num 8 {A100} {ALL}",
            f"{PLANS} mlperf --sizes 8 16 64 {H100} {ALL}",
        ),
        (
            f"{PLANS} paper --num 1 {ALL}",
            f"{PLANS} {FEASIBILITY} 18 {OTHERS}",
            f"{PLANS} paper --num 1 {A100} {ALL}",
            f"{PLANS} mlperf --sizes 8 {H100} {ALL}",
        ),
        "A sharder that takes more than 30 s has no plan, which is a loss.",
    ),
    _study(
        "policies",
        "The papers' policies alone",
        (f"policies {SEED} --sizes 50x4 20x4 200x4 50x2 50x8 200x16",),
        (f"policies {SEED} --sizes 10x2 --tasks 2 --widths 16 --accesses typical",),
    ),
    _study(
        "measured",
        "Embedding cost: computation measured, exchanges predicted",
        (f"measured --tasks 5 2 --ranks 4 8 {SEED} {MEASURED}",),
        (f"measured --tasks 1 --ranks 2 --rounds 2 {SEED} {MEASURED}",),
        "Each rank of a plan is looked up by itself on one device, in rounds of random order.",
    ),
    _study(
        "trained",
        "Training",
        ("steps --cases 2 --seed 0 1 2 --rounds 5 --widths 32",),
        ("steps --cases 1 --rounds 5 --widths 32",),
        "Random models on 2 ranks of this machine, trained in turns in one job.",
    ),
    _study(
        "scaling",
        "Planning time as measured, and costs",
        (
            f"{PLANS} sized --sizes {TABLES} 10000x32 {RANKS} 1000x1024 --sharders neuroshard dim",
            f"{PLANS} sized --sizes {TABLES} 500x32 {RANKS} --sharders autoshard dreamshard",
            f"{PLANS} sized --sizes {TABLES} 1000x2 --sharders torchrec",
        ),
        (f"{PLANS} sized --sizes 5x2 10x2 10x4 --sharders neuroshard torchrec autoshard dim",),
        "The exponent is the slope of a line through the points on a log-log scale. neuroshard "
        "returns the best plan that it has after `sharder.time_budget_s=10`.",
    ),
    _study(
        "production",
        "NeuroShard's production table",
        (f"{PRODUCTION} 1000x128",),
        (f"{PRODUCTION} 20x8",),
        "Tables with the statistics of Meta's dlrm_datasets, priced by the prior of the GPU. The "
        "paper's tables are not public, so its milliseconds are of another model; the ratios are "
        "what to compare.",
    ),
    _study(
        "simulated",
        "The production-like model on CPU ranks",
        (f"cluster {SEED}",),
        (f"cluster --tables 20 --ranks 8 {SEED}",),
    ),
    _study(
        "published_steps",
        "MLPerf's published steps",
        ("priors --only steps",),
        ("priors --only steps --num 1",),
    ),
)
DOCS = Path(__file__).parents[2] / "docs"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, default=Path("benchmark"), help="folder [%(default)s]")
    parser.add_argument(
        "--docs", type=Path, default=DOCS, help="folder that gets benchmark.md [%(default)s]"
    )
    names = [study.name for study in STUDIES]
    parser.add_argument("--studies", nargs="+", choices=names, default=names, help="some of them")
    parser.add_argument("--small", action="store_true", help="a rehearsal with tiny sizes")


def run(options: argparse.Namespace) -> int:
    """Do what is not done yet in the folder, and write the page from all rows there."""
    device = torch.device(device_type())
    name, threads = device_name(device), int(os.environ.get("OMP_NUM_THREADS", 1))
    planner = planner_of(REFERENCE, device=device.type, hardware=local_hardware(device))
    standing = standing_of(planner.cost_model)
    ended = run_in(
        options.out,
        STUDIES,
        package="benchmarks",
        chosen=options.studies,
        limit_s=len(STUDIES) * LIMIT_S,
        settings={
            "small": options.small,
            "device": name,
            "threads": threads,
            "versions": dict(versions()),
            "prices": f"{standing.kind}, of {standing.hardware}" if standing else "not known",
        },
    )
    figures = {one.step: one.figures for one in ended.known if "rows" in one.figures}
    seconds = {study: found["seconds"] for study, found in figures.items()}
    loads = [load for found in figures.values() for load in found["loads"]]
    conditions = {
        "hardware": f"{name}, {os.cpu_count()} cores, threads a rank: {threads}",
        "prices of predictions for it": "not known" if standing is None else standing.text,
        "versions": ", ".join(f"{name} {version}" for name, version in versions().items()),
        "commit of this page": commit() or "unknown",
        "load average, with the benchmark's own": (
            f"{min(loads):.1f} to {max(loads):.1f}" if loads else "not noted"
        ),
        "minutes": f"{sum(seconds.values()) / 60:.1f}: "
        + ", ".join(f"{study} {of_study / 60:.1f}" for study, of_study in seconds.items()),
    }
    if options.small:
        conditions["sizes"] = "of a rehearsal: these figures say nothing"
    rows = {study: found["rows"] for study, found in figures.items()}
    write_page(rows, STUDIES, conditions, options.docs, options.out)
    print(f"wrote {options.docs / 'benchmark.md'}, and the data to {options.out}")
    return ended.exit_code
