"""Measures what a step takes of the host: MLPerf's DLRM-DCNv2 with tiny tensors, beside TorchRec.

This is a proxy for a GPU's host, whose Python and dispatch are the same. On a CPU there are no
launches, streams or page-locked copies, and gloo takes the place of NCCL. The operators themselves
run on the host there; a line through batch sizes takes out what they need per sample. On a GPU the
command is the same: its backward pass is dispatched by another thread than the main one, so look at
the process.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.datasets.utils import Batch
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.train_pipeline import TrainPipeline, TrainPipelineSparseDist
from torchrec.models.dlrm import DLRM_DCN, DLRMTrain
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from benchmarks.host_operators import profiled_operators
from benchmarks.plain import wrapped_plainly
from benchmarks.training import NUM_DENSE, OPTIMIZER, Training, dataset_of, stream
from dlrm_sharded.files.text_table import Column, TextTable
from dlrm_sharded.model.dlrm import dlrm_dcnv2
from dlrm_sharded.model.torchrec_adapter import bag_configs
from dlrm_sharded.model.torchrec_overhead import record_always, record_for_profilers_only
from dlrm_sharded.plans.tables import COLUMN_MULTIPLE, Table
from dlrm_sharded.plans.task import ShardingTask
from dlrm_sharded.ranks.distributed import Rank, detect_topology
from dlrm_sharded.sharders.heuristics import GreedySharder
from dlrm_sharded.training.pipeline import make_pipeline
from studies.on_ranks import rows_on_ranks
from studies.parts import option
from studies.study import Case, Row

BASIS = "measured"
SIZE = COLUMN_MULTIPLE
"""Columns of tables, and inputs and outputs of layers."""

TABLES = tuple(Table(f"cat_{i}", 100, SIZE, 1.0) for i in range(26))
DENSE_LAYERS, OVER_LAYERS = [SIZE] * 3, [SIZE] * 4 + [1]
NUM_CROSS_LAYERS, CROSS_RANK = 3, SIZE
NUM_BATCHES = 4
NUM_WARMUP = 5
"""Steps before those that count: two batches of another size are in flight."""

BARE = "torchrec"
OPTIONS = {
    "ranks": option((1, 2)),
    "batch_sizes": option((8, 64, 256), "samples of a rank"),
    "steps": option(40, "steps of one loop in one round"),
    "rounds": option(12),
    "compile_mode": option("default", "of one loop more; none for no such loop"),
}


def cases(options: argparse.Namespace) -> Iterator[Case]:
    settings = {
        "batch_sizes": options.batch_sizes,
        "steps": options.steps,
        "rounds": options.rounds,
        "compile_mode": None if options.compile_mode == "none" else options.compile_mode,
    }
    for num_ranks in options.ranks:
        run = functools.partial(rows_on_ranks, __name__, num_ranks, **settings)
        yield Case(f"{num_ranks} ranks", run)


def rows_on_rank(
    rank: Rank, *, batch_sizes: list[int], steps: int, rounds: int, compile_mode: str | None
) -> list[Row]:
    pipelines = {
        BARE: bare(rank, batch_sizes[0]),
        "dlrm_sharded": ours(rank, batch_sizes[0]),
        "dense graph": ours(rank, batch_sizes[0], dense_graph=True),
    }
    if compile_mode:
        pipelines[f"compiled {compile_mode}"] = ours(
            rank, batch_sizes[0], compile_mode=compile_mode
        )
    batches = {
        size: itertools.cycle(list(stream(_dataset(size * rank.world_size), rank)))
        for size in batch_sizes
    }
    costs: dict[tuple[str, int], list[HostCost]] = {}
    for number in range(rounds + 1):
        for size in batch_sizes:
            # Every loop is first and last in turn, so that none gains from the order.
            for name in sorted(pipelines, reverse=bool(number % 2)):
                _set_regions(name)
                cost = measured(pipelines[name], batches[size], steps, rank)
                if number:  # the first round compiles and allocates
                    costs.setdefault((name, size), []).append(cost)
    rows: list[Row] = [
        {
            "ranks": rank.world_size,
            "device": rank.device.type,
            "loop": name,
            "batch_size": size,
            "steps": steps,
            "main_ms": [cost.main_ms for cost in found],
            "process_ms": [cost.process_ms for cost in found],
        }
        for (name, size), found in costs.items()
    ]
    for name, pipeline in pipelines.items():
        _set_regions(name)
        step = functools.partial(pipeline.progress, batches[batch_sizes[0]])
        operators = profiled_operators(step)
        rows.append({"ranks": rank.world_size, "loop": name, "operators": operators})
    return rows


def _set_regions(loop: str) -> None:
    """Let TorchRec's modules be what they are in a process with this loop alone."""
    if loop == BARE:
        record_always()
    else:
        record_for_profilers_only()


@dataclass(frozen=True, slots=True)
class HostCost:
    """CPU time of a step, of the main thread and of all threads of its process."""

    main_ms: float
    process_ms: float


def measured(
    pipeline: TrainPipeline[Batch, Any], batches: Iterator[Batch], steps: int, rank: Rank
) -> HostCost:
    """Take some steps and return their mean cost. Waiting takes no time of a CPU."""
    for _ in range(NUM_WARMUP):
        pipeline.progress(batches)
    dist.barrier()
    main_s, process_s = time.thread_time(), time.process_time()
    for _ in range(steps):
        pipeline.progress(batches)
    main_s, process_s = time.thread_time() - main_s, time.process_time() - process_s
    if rank.device.type == "cuda":
        torch.cuda.synchronize()
    return HostCost(1e3 * main_s / steps, 1e3 * process_s / steps)


class BareDlrm(DLRMTrain):
    """TorchRec's model with its loss, in bfloat16 as a user would write it."""

    def __init__(self, model: DLRM_DCN, device: torch.device) -> None:
        super().__init__(model)
        self.device_type = device.type

    def forward(self, batch: Batch) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        with torch.autocast(self.device_type, torch.bfloat16):
            result: tuple[Tensor, tuple[Tensor, Tensor, Tensor]] = super().forward(batch)
        return result


def bare(rank: Rank, local_batch_size: int) -> TrainPipeline[Batch, Any]:
    """Return TorchRec's pipeline of TorchRec's model, with whole tables as ours."""
    collection = EmbeddingBagCollection(tables=bag_configs(TABLES), device=torch.device("meta"))
    model = DLRM_DCN(
        collection,
        NUM_DENSE,
        DENSE_LAYERS,
        OVER_LAYERS,
        dcn_num_layers=NUM_CROSS_LAYERS,
        dcn_low_rank_dim=CROSS_RANK,
        dense_device=rank.device,
    )
    wrapped, optimizer = wrapped_plainly(
        BareDlrm(model, rank.device),
        rank,
        batch_size=local_batch_size * rank.world_size,
        constraints={
            table.name: ParameterConstraints(sharding_types=["table_wise"]) for table in TABLES
        },
    )
    return TrainPipelineSparseDist(wrapped, optimizer, rank.device)


def ours(rank: Rank, local_batch_size: int, **options: Any) -> TrainPipeline[Batch, Any]:
    """Return the same model as this project trains it on GPUs, with the same pipeline.

    Args:
        options: further ones of the model.
    """
    task = ShardingTask(TABLES, detect_topology(memory_gib=1), local_batch_size * rank.world_size)
    model = dlrm_dcnv2(
        TABLES,
        NUM_DENSE,
        dense_layers=DENSE_LAYERS,
        over_layers=OVER_LAYERS,
        num_cross_layers=NUM_CROSS_LAYERS,
        cross_rank=CROSS_RANK,
        device=rank.device,
        bf16=True,
        **options,
    )
    OPTIMIZER.fuse_into(model)
    plan = GreedySharder("size_lookup").shard(task)
    training = Training.under(plan, model, task, rank)
    return make_pipeline("sparse_dist", training.sharded, training.optimizer, rank.device)


def _dataset(batch_size: int) -> Any:
    return dataset_of(TABLES, batch_size, NUM_BATCHES)


def report(rows: Sequence[Row], reference: str | None) -> str:
    timed = [row for row in rows if "main_ms" in row]
    counted = [row for row in rows if "operators" in row]
    text = (
        f"{len(timed[0]['main_ms'])} interleaved rounds of {timed[0]['steps']} steps; CPU time of "
        "rank 0."
    )
    if timed[0]["device"] == "cpu":
        text += (
            " A proxy for a GPU's host: without launches, streams and page-locked copies, and with "
            "gloo in place of NCCL."
        )
    return "\n\n".join([text, _time_table(timed), *map(_operator_table, _by_ranks(counted))])


def _time_table(rows: Sequence[Row]) -> str:
    lines = []
    for of_ranks in _by_ranks(rows):
        by_loop: dict[str, list[Row]] = {}
        for row in of_ranks:
            by_loop.setdefault(row["loop"], []).append(row)
        zero = {
            key: {name: at_size_zero(found, key) for name, found in by_loop.items()}
            for key in ("main_ms", "process_ms")
        }
        for name, found in by_loop.items():
            ratios = zero["main_ms"][name] / zero["main_ms"][BARE]
            low, median, high = np.percentile(ratios, [25, 50, 75])
            smallest = min(found, key=lambda row: row["batch_size"])
            lines.append(
                (
                    *(str(of_ranks[0]["ranks"]), name),
                    float(np.median(smallest["main_ms"])),
                    *(float(np.median(zero[key][name])) for key in ("main_ms", "process_ms")),
                    float(median),
                    f"{low:.3f} to {high:.3f}",
                )
            )
    titles = ("main thread, smallest batch, ms", "main thread, ms", "process, ms")
    columns = [*(Column(title, ".2f") for title in titles), Column(f"/ {BARE}", ".3f")]
    return TextTable(["ranks", "loop", *columns, "quartiles"], lines).markdown()


def at_size_zero(rows: Sequence[Row], key: str) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return [rounds], where a line through the batch sizes of a loop meets zero."""
    sizes = np.array([row["batch_size"] for row in rows], float)
    found = np.array([row[key] for row in rows])
    if len(set(sizes)) == 1:
        return found.mean(axis=0)
    return np.asarray(np.polyfit(sizes, found, 1)[1])


def _operator_table(rows: Sequence[Row]) -> str:
    """Write the leaf operators of a step by part, and how many of all are copies."""
    parts = dict.fromkeys(part for row in rows for part in row["operators"])
    lines = [(part, *(_cell([row["operators"].get(part, {})]) for row in rows)) for part in parts]
    lines.append(("all", *(_cell(row["operators"].values()) for row in rows)))
    title = (
        f"Leaf operators of a step on {rows[0]['ranks']} ranks (copies and casts among them; in "
        "compiled graphs):"
    )
    return f"{title}\n\n{TextTable(['part', *(row['loop'] for row in rows)], lines).markdown()}"


def _cell(counts: Collection[Mapping[str, float]]) -> str:
    eager, copies, compiled = (
        round(sum(of_part.get(kind, 0.0) for of_part in counts))
        for kind in ("eager", "copies", "compiled")
    )
    return f"{eager} ({copies}; {compiled})" if compiled else f"{eager} ({copies})"


def _by_ranks(rows: Sequence[Row]) -> list[list[Row]]:
    numbers = dict.fromkeys(row["ranks"] for row in rows)
    return [[row for row in rows if row["ranks"] == number] for number in numbers]
