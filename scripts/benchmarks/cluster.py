"""A model like NeuroShard's production model on simulated ranks, of which some are measured."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.figures import sharder_table
from benchmarks.planners import add_sharder_arguments, on_device
from dlrm_sharded.datasets.task_sets import scaling_task
from dlrm_sharded.files.json_files import write_json
from studies.processes import run_python
from studies.study import Case, Row

BASIS = "simulated"
SHARDERS = ("random", "dim", "size_lookup", "torchrec", "autoshard", "dreamshard", "neuroshard")
LOCAL_BATCH_SIZE = 64
RANKS_OF_HOST = 8
MEASURED_RANKS = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tables", type=int, default=1000)
    parser.add_argument("--ranks", type=int, default=128)
    parser.add_argument("--seed", type=int, default=0, help="seed of the tables [%(default)s]")
    add_sharder_arguments(parser, SHARDERS)


def cases(options: argparse.Namespace) -> Iterator[Case]:
    yield Case(f"{options.tables}x{options.ranks}", functools.partial(_rows, options))


def _rows(options: argparse.Namespace) -> list[Row]:
    task = on_device(scaling_task(options.tables, options.ranks, seed=options.seed), "cpu")
    hosts = {"local_world_size": min(options.ranks, RANKS_OF_HOST)}
    topology = dataclasses.replace(task.topology, inter_host_bytes_per_s=1.25e9, **hosts)
    batch_size = LOCAL_BATCH_SIZE * options.ranks
    task = dataclasses.replace(task, topology=topology, batch_size=batch_size)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_json(folder / "task.json", task.to_json())
        run_python(
            *("-m", "dlrm_sharded.commands.simulate", f"task={folder / 'task.json'}"),
            *(f"sharder={','.join(options.sharders)}", f"out={folder / 'out'}", "journal=none"),
            *(f"measured_ranks={min(MEASURED_RANKS, options.ranks)}", "spread=0.05"),
            *("model.dense_layers=[64,16]", "model.over_layers=[64,1]"),
        )
        found = json.loads((folder / "out" / "simulation.json").read_text())
    size = {"num_tables": options.tables, "world_size": options.ranks, "batch_size": batch_size}
    rows: list[Row] = [
        {
            "sharder": run["sharder"],
            "cost_ms": run["embedding_cost_ms"],
            "predicted_ms": run["predicted_embedding_cost_ms"],
            "simulated_step_ms": run["step_ms"],
            "num_measured": run["ranks"].get("measured", 0),
            "error": None,
        }
        for run in found["sharders"]
    ]
    rows += [
        {"sharder": failed["name"], "cost_ms": None, "error": failed["message"]}
        for failed in found["failed"]
    ]
    return [size | row for row in rows]


def report(rows: Sequence[Row], reference: str | None) -> str:
    """Write the costs of the sharders' plans and the steps."""
    first = rows[0]
    text = (
        f"{first['num_tables']:,} tables on {first['world_size']} CPU ranks, batch "
        f"{first['batch_size']:,}, as `dlrm-simulate` simulates them: costly ranks and a random "
        "sample are measured on this machine, the others scaled like the sample, and exchanges "
        "are predicted. CPU lookups cost nearly the sum of their tables, so sharders differ less "
        "than on GPUs."
    )
    ratios = {"embedding cost": "cost_ms", "predicted": "predicted_ms", "step": "simulated_step_ms"}
    others = {
        "embedding cost, ms": lambda found: _number(found, "cost_ms"),
        "step, ms": lambda found: _number(found, "simulated_step_ms"),
        "measured ranks": lambda found: found[0].get("num_measured", "-"),
    }
    return f"{text}\n\n{sharder_table(rows, reference, ratios, others)}"


def _number(found: Sequence[Row], key: str) -> str:
    value = found[0].get(key)
    return str(found[0]["error"]) if value is None else f"{value:.1f}"
