"""A model like NeuroShard's production model on simulated ranks, of which some are measured."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.figures import rows_table, sharder_table
from benchmarks.planners import SHARDERS_TEXT, on_device
from dlrm_sharded.datasets.task_sets import scaling_task
from dlrm_sharded.files.json_files import write_json
from studies.parts import option
from studies.processes import run_python
from studies.study import Case, Row

BASIS = "simulated"
SHARDERS = ("random", "dim", "size_lookup", "torchrec", "autoshard", "dreamshard", "neuroshard")
LOCAL_BATCH_SIZE = 64
RANKS_OF_HOST = 8
MEASURED_RANKS = 8


OPTIONS = {
    "tables": option(1000),
    "ranks": option(128),
    "seed": option(0, "seed of the tables"),
    "sharders": option(SHARDERS, SHARDERS_TEXT),
}


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
    failed = [
        {"sharder": one["sharder"], "cost_ms": None, "error": one["message"]}
        for one in found["failed"]
    ]
    return [size | row for row in [*map(_figures, found["sharders"]), *failed]]


def _figures(run: Mapping[str, Any]) -> Row:
    return {
        "sharder": run["sharder"],
        "cost_ms": run["embedding_cost_ms"],
        "predicted_ms": run["predicted_embedding_cost_ms"],
        "simulated_step_ms": run["step_ms"],
        "num_measured": run["ranks"].get("measured", 0),
    }


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
    columns = {
        "sharder": "{sharder}",
        "embedding cost, ms": "{cost_ms:.1f}",
        "step, ms": "{simulated_step_ms:.1f}",
        "measured ranks": "{num_measured}",
    }
    planned = [row for row in rows if row["cost_ms"] is not None]
    tables = [sharder_table(rows, reference, ratios), rows_table(planned, columns)]
    return "\n\n".join([text, *tables])
