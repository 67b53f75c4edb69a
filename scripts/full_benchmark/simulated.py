"""The production-like model on simulated ranks: lookups measured here, a sample of the ranks."""

from __future__ import annotations

import dataclasses
import functools
import json
import tempfile
from pathlib import Path

from benchmarks.compared import on_device
from dlrm_sharded.datasets.task_sets import scaling_task
from dlrm_sharded.files.json_files import write_json
from full_benchmark.planned import SEED
from full_benchmark.sizes import FULL, SMALL
from studies.processes import SCRIPTS, run_python
from studies.study import Case, Row, StudyRun

SHARDERS = ("random", "dim", "size_lookup", "torchrec", "autoshard", "dreamshard", "neuroshard")
LOCAL_BATCH_SIZE = 64
RANKS_OF_HOST = 8
MEASURED_RANKS = 8


def run(study: StudyRun) -> None:
    num_tables, num_ranks = (SMALL if study.small else FULL).production
    simulate = functools.partial(_run, num_tables, num_ranks)
    study.rows([Case(f"{num_tables}x{num_ranks}", simulate)], "simulated")


def _run(num_tables: int, num_ranks: int) -> list[Row]:
    task = on_device(scaling_task(num_tables, num_ranks, seed=SEED), "cpu")
    topology = dataclasses.replace(
        task.topology, local_world_size=min(num_ranks, RANKS_OF_HOST), inter_host_bytes_per_s=1.25e9
    )
    batch_size = LOCAL_BATCH_SIZE * num_ranks
    task = dataclasses.replace(task, topology=topology, batch_size=batch_size)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_json(folder / "task.json", task.to_json())
        run_python(
            *(str(SCRIPTS / "simulate.py"), f"task={folder / 'task.json'}"),
            *(f"sharder={','.join(SHARDERS)}", f"out={folder / 'out'}", "journal=none"),
            *(f"measured_ranks={min(MEASURED_RANKS, num_ranks)}", "spread=0.05"),
            *("model.dense_layers=[64,16]", "model.over_layers=[64,1]"),
        )
        found = json.loads((folder / "out" / "simulation.json").read_text())
    costs = [
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
    without_plan = [
        {"sharder": failed["name"], "cost_ms": None, "error": failed["message"]}
        for failed in found["failed"]
    ]
    size = {"num_tables": num_tables, "world_size": num_ranks, "batch_size": batch_size}
    return [size | row for row in [*costs, *without_plan]]
