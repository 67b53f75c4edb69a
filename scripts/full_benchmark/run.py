"""Runs the studies of the benchmark, case by case, and writes its page."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from pathlib import Path

import torch

from benchmarks.compared import planner_of
from dlrm_sharded.cost.base import standing_of
from dlrm_sharded.files.provenance import commit, device_name, versions
from dlrm_sharded.hardware.detect import local_hardware
from dlrm_sharded.plans.standing import Standing
from dlrm_sharded.ranks.devices import device_type
from full_benchmark.export import write_board, write_tables
from full_benchmark.page import REFERENCE, page
from full_benchmark.pictures import pictures
from studies.command_line import run_in
from studies.runner import Outcome
from studies.study import Study

LIMIT_S = 7200.0
"""Time of a study, which none needs: the whole benchmark takes half an hour."""

STUDIES = tuple(
    Study(name, limit_s=LIMIT_S, least_s=0.0)
    for name in (
        *("planned", "measured", "trained", "scaling"),
        *("production", "simulated", "published_steps"),
    )
)
DOCS = Path(__file__).parents[2] / "docs"
PICTURE = "benchmark_{}.png"


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
    torch_device = torch.device(device_type())
    device = device_name(torch_device)
    standing = _standing(torch_device)
    settings = {
        "small": options.small,
        "device": device,
        "threads": int(os.environ.get("OMP_NUM_THREADS", 1)),
        "versions": dict(versions()),
        "prices": f"{standing.kind}, of {standing.hardware}" if standing else "not known",
    }
    ended = run_in(
        options.out,
        STUDIES,
        package="full_benchmark",
        chosen=options.studies,
        limit_s=len(STUDIES) * LIMIT_S,
        settings=settings,
    )
    known = {outcome.step: outcome for outcome in ended.known if "rows" in outcome.figures}
    rows = {name: outcome.figures["rows"] for name, outcome in known.items()}
    conditions = {
        "hardware": f"{device}, {os.cpu_count()} cores, threads a rank: {settings['threads']}",
        "prices of predictions for it": "not known" if standing is None else standing.text,
        "versions": ", ".join(f"{name} {version}" for name, version in versions().items()),
        "commit of this page": commit() or "unknown",
        "load average, with the benchmark's own": _loads(known),
        "minutes": _minutes(known),
    }
    if options.small:
        conditions["sizes"] = "of a rehearsal: these figures say nothing"
    drawn = pictures(rows)
    paths = {name: PICTURE.format(name) for name in drawn}
    text = page(rows, conditions, paths)
    options.docs.mkdir(parents=True, exist_ok=True)
    (options.docs / "benchmark.md").write_text(text)
    for name, figure in drawn.items():
        figure.savefig(options.docs / paths[name], dpi=110)
    write_tables(rows, options.out)
    write_board(rows, drawn, text, options.out)
    print(f"wrote {options.docs / 'benchmark.md'}, and the data to {options.out}")
    return ended.exit_code


def _loads(known: Mapping[str, Outcome]) -> str:
    loads = [load for outcome in known.values() for load in outcome.figures["loads"]]
    return f"{min(loads):.1f} to {max(loads):.1f}" if loads else "not noted"


def _minutes(known: Mapping[str, Outcome]) -> str:
    """Say how long the benchmark took, and its studies."""
    seconds = {name: outcome.figures["seconds"] for name, outcome in known.items()}
    parts = ", ".join(f"{name} {of_study / 60:.1f}" for name, of_study in seconds.items())
    return f"{sum(seconds.values()) / 60:.1f}: {parts}"


def _standing(device: torch.device) -> Standing | None:
    """Say how well the cost model knows this machine, on which predictions depend."""
    planner = planner_of(REFERENCE, device=device.type, hardware=local_hardware(device))
    return standing_of(planner.cost_model)
