"""Plans of DLRMv3's and DLRMv4's tables on GPUs: every sharder, and TorchRec as that code calls it.

Prices are the priors of the GPUs; those of sequences were measured on none.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterator, Sequence

import torch
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner
from torchrec.distributed.planner import Topology as TorchRecTopology
from torchrec.distributed.planner.types import PlannerError
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection

from benchmarks.planners import SHARDERS_TEXT, planner_of
from dlrm_sharded.cost.base import price
from dlrm_sharded.datasets.presets import Tables
from dlrm_sharded.datasets.sequence_tables import (
    EMBEDDING_DIM,
    profiled_streaming_tables,
    profiled_yambda_tables,
)
from dlrm_sharded.dense.gpu_prices import PEAK_SHARE
from dlrm_sharded.files.errors import InfeasibleTaskError, InvalidPlanError, ShardingError
from dlrm_sharded.files.text_table import Column, TextTable
from dlrm_sharded.hardware.gpus.gpu_specs import GpuSpec, gpu_specs
from dlrm_sharded.hardware.hardware import Hardware
from dlrm_sharded.model.torchrec_adapter import DATA_TYPES, from_torchrec
from dlrm_sharded.plans.plan import ShardingPlan
from dlrm_sharded.plans.plan_cost import COMPUTE_STAGES, PlanCost
from dlrm_sharded.plans.task import GIB, ShardingTask, Topology
from dlrm_sharded.plans.validation import validate
from dlrm_sharded.simulation.machines import TableMemory, machine_of
from studies.parts import option
from studies.processes import quiet
from studies.study import Case, Row

BASIS = "predicted"
PUBLISHED = "published"
"""Name of TorchRec's planner as the published code calls it: told a memory, and nothing of ids."""

SHARDERS = (
    *("random", "size", "dim", "lookup", "size_lookup", PUBLISHED, "torchrec", "torchrec_dp"),
    *("autoshard", "dreamshard", "neuroshard"),
)
LAYER_COLUMNS, PRODUCT_COLUMNS, ATTENTION_COLUMNS = EMBEDDING_DIM, 2048 + 3 * 512, 4 * (128 + 128)
"""Columns of an HSTU layer's input, of what its two products make of each, and of its attention."""

MEMORY_FRACTION = 0.7


@dataclasses.dataclass(frozen=True, slots=True)
class Model:
    """A published set-up.

    Args:
        tables: returns the tables for a global batch size.
        samples: of one GPU in a step.
        hbm_gib, ddr_gib: what the published code tells TorchRec's planner of the memory of a rank.
        layers: of HSTU.
    """

    tables: Callable[[int], Tables]
    samples: int
    hbm_gib: int
    ddr_gib: int
    layers: int


MODELS = {
    "dlrm_v3_streaming": Model(
        lambda batch_size: profiled_streaming_tables(45, batch_size=batch_size), 64, 160, 32, 5
    ),
    "yambda_5b": Model(
        lambda batch_size: profiled_yambda_tables(batch_size=batch_size), 1024, 260, 0, 3
    ),
}

OPTIONS = {
    "data": option(tuple(MODELS), "sets of tables"),
    "gpus": option(("h100_sxm", "b200_sxm"), "GPUs whose priors have the prices"),
    "ranks": option((8, 16, 64, 256), "numbers of GPUs"),
    "sharders": option(SHARDERS, f"{SHARDERS_TEXT}; {PUBLISHED}: TorchRec as its code calls it"),
}


def cases(options: argparse.Namespace) -> Iterator[Case]:
    for data in options.data:
        for gpu in options.gpus:
            for ranks in options.ranks:
                for sharder in options.sharders:
                    run = functools.partial(_rows, data, gpu, ranks, sharder)
                    yield Case(f"{data}/{gpu}/{ranks}/{sharder}", run)


def task_of(data: str, gpu: str, num_ranks: int) -> ShardingTask:
    """Return the published samples of a GPU on so many, with row-wise Adagrad."""
    model, optimizer = MODELS[data], "rowwise_adagrad"
    batch_size = model.samples * num_ranks
    stated = Topology(8, GIB, 8, optimizer_bytes_per_row=4)
    topology = machine_of(gpu, TableMemory(None, MEMORY_FRACTION)).topology(num_ranks, stated)
    return ShardingTask(model.tables(batch_size), topology, batch_size, optimizer)


def published_plan(task: ShardingTask, model: Model) -> ShardingPlan:
    """Return the plan that the published code asks TorchRec for.

    Raises:
        InfeasibleTaskError: the planner finds none.
    """
    configs = [
        EmbeddingConfig(
            name=table.name,
            num_embeddings=table.num_embeddings,
            embedding_dim=table.embedding_dim,
            feature_names=[f"{table.name}_{i}" for i in range(table.num_features)],
            data_type=DATA_TYPES[table.precision],
        )
        for table in task.tables
    ]
    topology = TorchRecTopology(
        world_size=task.topology.world_size,
        local_world_size=task.topology.ranks_per_host,
        compute_device="cuda",
        hbm_cap=model.hbm_gib * GIB,
        ddr_cap=model.ddr_gib * GIB,
    )
    collection = EmbeddingCollection(tables=configs, device=torch.device("meta"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about TorchRec's own defaults
        try:
            found = EmbeddingShardingPlanner(topology=topology).plan(
                collection, [EmbeddingCollectionSharder()]
            )
        except PlannerError as error:
            raise InfeasibleTaskError(f"TorchRec's planner found no plan: {error}") from error
    shards = from_torchrec(found.plan[""], task.tables, task.topology.world_size)
    return ShardingPlan(task.topology.world_size, shards)


def hstu_ms(model: Model, tables: Tables, spec: GpuSpec) -> float:
    """Return the time of HSTU's layers on a rank, by their operations alone, forward and backward.

    Attention is causal; everything besides the layers is left out.
    """
    tokens = max(table.pooling_factor for table in tables)
    products = tokens * LAYER_COLUMNS * PRODUCT_COLUMNS
    attention = tokens**2 / 2 * ATTENTION_COLUMNS
    flop = 3 * 2 * (products + attention) * model.layers * model.samples
    assert spec.bf16_tflops is not None
    return flop / (PEAK_SHARE * spec.bf16_tflops * 1e9)


def _rows(data: str, gpu: str, num_ranks: int, sharder: str) -> list[Row]:
    quiet()
    task, model, spec = task_of(data, gpu, num_ranks), MODELS[data], gpu_specs()[gpu]
    name = "neuroshard" if sharder == PUBLISHED else sharder
    planner = planner_of(name, device="cuda", hardware=Hardware(spec.device_name))
    row: Row = {"data": data, "gpu": gpu, "world_size": num_ranks, "sharder": sharder}
    row |= {"cost_ms": None, "error": None, "hstu_ms": hstu_ms(model, task.tables, spec)}
    try:
        if sharder == PUBLISHED:
            plan = published_plan(task, model)
            priced = price(planner.cost_model, task, planner.exchange_precision)
            assert priced is not None
            cost: PlanCost | None = priced.predict(plan)
            bound_ms = None
            try:
                validate(plan, task)
            except InvalidPlanError as error:
                row["error"] = str(error)
        else:
            plan, report = planner.plan(task)
            cost, bound_ms = report.cost, report.lower_bound_ms
    except ShardingError as error:
        return [row | {"error": str(error)}]
    assert cost is not None
    return [
        row
        | {
            "cost_ms": cost.cost_ms,
            "lookups_ms": sum(cost.stage_max_ms(stage) for stage in COMPUTE_STAGES),
            "bound_ms": bound_ms,
            "peak_gib": max(plan.bytes_by_rank(task.topology)) / GIB,
            "room_gib": task.topology.memory_bytes / GIB,
        }
    ]


def report(rows: Sequence[Row], reference: str | None) -> str:
    """Write a table for each set of tables and GPU, with a line for each number of GPUs.

    A cost in brackets is of a plan that exceeds the memory or is not trained here. The bound, the
    memory and the part of the step are those of the last sharder.
    """
    texts = ["Embedding cost in ms; in brackets, of plans that do not fit or are not trained here."]
    for data, gpu in dict.fromkeys((row["data"], row["gpu"]) for row in rows):
        of_both = [row for row in rows if (row["data"], row["gpu"]) == (data, gpu)]
        names = list(dict.fromkeys(row["sharder"] for row in of_both))
        lines = []
        for size in dict.fromkeys(row["world_size"] for row in of_both):
            found = {row["sharder"]: row for row in of_both if row["world_size"] == size}
            last, part = found.get(names[-1], {}), None
            if last.get("cost_ms") is not None:
                part = 100 * last["cost_ms"] / (last["cost_ms"] + last["hstu_ms"])
            others = (last.get("bound_ms"), last.get("peak_gib"), part)
            lines.append((size, *(_cell(found.get(name)) for name in names), *others))
        columns = (
            *("GPUs", *(name.split(",")[0] for name in names), Column("bound", ".1f")),
            *(Column("GiB a GPU", ".0f"), Column("% of a step with HSTU's layers", ".0f")),
        )
        texts += [f"`data={data}` on {gpu}:", TextTable(columns, lines).markdown()]
    return "\n\n".join(texts)


def _cell(row: Row | None) -> str | None:
    if row is None or row["cost_ms"] is None:
        return None
    return f"{row['cost_ms']:,.1f}" if row["error"] is None else f"({row['cost_ms']:,.1f})"
