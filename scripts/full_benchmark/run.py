"""Runs the studies of the benchmark, item by item, and writes its page."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from tqdm import tqdm

from benchmarks.compared import planner_of
from dlrm_sharded.cost.base import standing_of
from dlrm_sharded.files.provenance import commit, device_name, versions
from dlrm_sharded.hardware.detect import local_hardware
from dlrm_sharded.ranks.devices import device_type
from full_benchmark import (
    measured_ranks,
    planned,
    production,
    production_simulated,
    published_steps,
    scaling,
    trained,
)
from full_benchmark.export import write_board, write_tables
from full_benchmark.page import REFERENCE, page
from full_benchmark.pictures import pictures
from full_benchmark.sizes import FULL, SMALL
from full_benchmark.store import Store
from full_benchmark.study import Study

STUDIES = (
    planned,
    measured_ranks,
    trained,
    scaling,
    production,
    production_simulated,
    published_steps,
)
DOCS = Path(__file__).parents[2] / "docs"
PICTURE = "benchmark_{}.png"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, default=Path("benchmark"), help="folder [%(default)s]")
    parser.add_argument(
        "--docs", type=Path, default=DOCS, help="folder that gets benchmark.md [%(default)s]"
    )
    parser.add_argument("--studies", nargs="+", help="names of studies; all by default")
    parser.add_argument("--small", action="store_true", help="a rehearsal with tiny sizes")


def run(options: argparse.Namespace) -> None:
    """Do what is not done yet in the folder, and write the page from all rows there."""
    sizes = SMALL if options.small else FULL
    studies = [module.study(sizes) for module in STUDIES]
    chosen = [s for s in studies if options.studies is None or s.name in options.studies]
    torch_device = torch.device(device_type())
    device = device_name(torch_device)
    settings = {
        "small": options.small,
        "device": device,
        "threads": torch.get_num_threads(),
        "versions": dict(versions()),
        "prices": _prices(torch_device),
    }
    store = Store(options.out, settings)
    _run_items(store, chosen)
    rows = {study.name: store.rows(study.name) for study in studies}
    conditions = {
        "hardware": f"{device}, {os.cpu_count()} cores, threads a rank: {settings['threads']}",
        "prices of predictions for it": settings["prices"],
        "versions": ", ".join(f"{name} {version}" for name, version in versions().items()),
        "commit of this page": commit() or "unknown",
        "load average, with the benchmark's own": _loads(store, studies),
        "minutes": _minutes({study.name: store.seconds(study.name) for study in studies}),
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


def _loads(store: Store, studies: Sequence[Study]) -> str:
    loads = [load for study in studies for load in store.loads(study.name)]
    return f"{min(loads):.1f} to {max(loads):.1f}" if loads else "not noted"


def _minutes(seconds: Mapping[str, float]) -> str:
    """Say how long the benchmark took, and its studies."""
    parts = ", ".join(f"{name} {of_study / 60:.1f}" for name, of_study in seconds.items())
    return f"{sum(seconds.values()) / 60:.1f}: {parts}"


def _prices(device: torch.device) -> str:
    """Say how well the cost model knows this machine, on which predictions depend."""
    planner = planner_of(REFERENCE, device=device.type, hardware=local_hardware(device))
    standing = standing_of(planner.cost_model)
    return "not known" if standing is None else standing.text


def _run_items(store: Store, studies: Sequence[Study]) -> None:
    """Run the items without rows; the bar counts expected seconds, for its remaining time."""
    todo = [(s, item) for s in studies for item in s.items if not store.is_done(s, item)]
    total = sum(item.seconds for _, item in todo)
    layout = "{percentage:3.0f}% {bar} {elapsed} passed, about {remaining} to go  {postfix}"
    with tqdm(total=total, bar_format=layout, smoothing=0) as bar:
        for study, item in todo:
            bar.set_postfix_str(f"{study.name} {item.key}")
            started, load = time.perf_counter(), os.getloadavg()[0]
            rows = item.run()
            seconds = time.perf_counter() - started
            store.add(study, item, rows, seconds=seconds, load=load)
            bar.update(item.seconds)
