"""Compares plans of the least predicted step with those of the least cost, on GPUs by their prior.

Steps are those of the GPUs: where hosts need more time, all plans have the steps of the hosts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from hydra import compose, initialize_config_dir

from benchmarks.mlperf_steps import MLPERF_BATCH_SIZES, mlperf_task, prior_model
from benchmarks.planners import on_device
from dlrm_sharded.commands.step_model import cluster_of
from dlrm_sharded.commands.yamls import CONF_DIR
from dlrm_sharded.cost.base import PricedTask
from dlrm_sharded.cost.cluster import Cluster
from dlrm_sharded.datasets.paper_tables import PAPER_SETS
from dlrm_sharded.hardware.context import RunContext
from dlrm_sharded.hardware.gpus.gpu_specs import gpu_specs
from dlrm_sharded.hardware.hardware import Hardware
from dlrm_sharded.plans.plan import ShardingPlan
from dlrm_sharded.plans.task import ShardingTask
from dlrm_sharded.sharders.base import SharderContext
from dlrm_sharded.sharders.neuroshard import OBJECTIVES, neuroshard_sharder
from studies.study import Row

GPU = "h100_sxm"
PIPELINES = ("sparse_dist", "semi_sync")
PAPER_TASKS = {"neuroshard_table_1": 2, "dreamshard_table_1": 1, "autoshard_synthetic": 1}
"""Number of tasks of each packaged set."""

PATIENCE = 3


class _WithoutHosts(Cluster):
    """GPUs that wait for no host."""

    def _host(self, plan: ShardingPlan, lookups_ms: float) -> None:
        return None


def step_plans(num: int | None) -> Iterator[tuple[str, Callable[[], Row]]]:
    """Yield a name and a row for each task and pipeline."""
    spec = gpu_specs()[GPU]
    tasks: list[tuple[str, str, ShardingTask]] = []
    for num_gpus, batch_size in [*MLPERF_BATCH_SIZES.items()][:num]:
        tasks.append(("mlperf", "dcnv2", mlperf_task(num_gpus, batch_size, spec)))
    for name, size in PAPER_TASKS.items():
        found = PAPER_SETS[name](num=min(size, num or size))
        tasks += [(name, "dlrm_mlperf", entry.task) for entry in found]
    for number, (name, model, task) in enumerate(tasks):
        for pipeline in PIPELINES:
            row = functools.partial(_row, name, model, pipeline, on_device(task, "cuda"))
            yield f"{number} {name} {pipeline}", row


def _row(name: str, model: str, pipeline: str, task: ShardingTask) -> Row:
    spec = gpu_specs()[GPU]
    prices, run = prior_model(spec), RunContext("cuda", Hardware(spec.device_name))
    cluster = _cluster(model, pipeline, run, prices.price(task))
    context = SharderContext(run, prices, step_model=lambda priced: cluster)
    row: Row = {
        "set": name,
        "tables": len(task.tables),
        "ranks": task.topology.world_size,
        "pipeline": pipeline,
    }
    for objective in OBJECTIVES:
        keys: dict[str, Any] = {"objective": objective, "patience": PATIENCE, "time_budget_s": None}
        plan = neuroshard_sharder(context, **keys).shard(task)
        cost = prices.predict(plan, task)
        row |= {
            f"{objective}_step_ms": cluster.device_ms(cost),
            f"{objective}_compute_ms": max(rank.computation_ms for rank in cost.per_rank),
            f"{objective}_exchange_ms": max(rank.exchange_ms for rank in cost.per_rank),
        }
    return row | {"gain": f"{1 - row['step_step_ms'] / row['cost_step_ms']:.1%}"}


def _cluster(model: str, pipeline: str, run: RunContext, priced: PricedTask) -> Cluster:
    """Return the cluster that a config plans for, without its hosts."""
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF_DIR)):
        overrides = [f"model={model}", "model.bf16=true", f"overlap={pipeline}"]
        cluster = cluster_of(compose("simulate", overrides), run, priced)
    return _WithoutHosts(cluster.task, cluster.dense, cluster.overlap, cluster.seed)
