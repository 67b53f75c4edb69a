"""Simulate a cluster on one device: the command `dlrm-simulate`.

dlrm-simulate data=dlrm_datasets_pool topology.world_size=128 topology.ranks_per_host=8 \
    sharder=random,neuroshard out=FOLDER

Each rank's lookups run here, one rank after another; with `hardware=h100_sxm`, the prior of that
GPU prices them. The same command goes on with a simulation that was interrupted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import logging
import math
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import hydra
import torch
from omegaconf import DictConfig

from dlrm_sharded.commands.exit_codes import exit_codes
from dlrm_sharded.commands.first_start import measured_here
from dlrm_sharded.commands.sharders import (
    build_planner,
    config_of_sharder,
    plain,
    run_with_sharder_list,
)
from dlrm_sharded.commands.simulated_cluster import (
    SimulatedCluster,
    build_cluster,
    dense_times,
    memory_workload,
)
from dlrm_sharded.commands.task import HERE
from dlrm_sharded.commands.words import checked_names
from dlrm_sharded.commands.yamls import CONF_DIR
from dlrm_sharded.cost.base import price
from dlrm_sharded.cost.cluster import Cluster
from dlrm_sharded.dense.gpu_prices import DENSE_ERROR
from dlrm_sharded.files.errors import ConfigError, check_count, check_number
from dlrm_sharded.files.json_files import folder_to_write, write_json
from dlrm_sharded.files.provenance import device_name, versions
from dlrm_sharded.hardware.context import RunContext
from dlrm_sharded.measuring.rank_bench import RankBench, TableIds
from dlrm_sharded.plans.plan import with_precisions
from dlrm_sharded.ranks.distributed import process_group
from dlrm_sharded.sharders.planning import Planner
from dlrm_sharded.simulation.accesses import drawn_ids, ids_source
from dlrm_sharded.simulation.files import write_simulation
from dlrm_sharded.simulation.neighbors import busy_neighbors
from dlrm_sharded.simulation.planned import Planned
from dlrm_sharded.simulation.plans import plans_of
from dlrm_sharded.simulation.ranks import RankTimer, RankTimes, priced_ranks, time_ranks
from dlrm_sharded.simulation.run import simulate
from dlrm_sharded.simulation.simulation_text import counted, heading_text, simulation_lines
from dlrm_sharded.simulation.store import Store
from dlrm_sharded.step.parts import DenseTimes

CONFIG = "simulate"
AUTO, ALL, MEASURED = "auto", "all", "measured"

log = logging.getLogger("dlrm_sharded.simulate")


@hydra.main(version_base="1.3", config_path=str(CONF_DIR), config_name=CONFIG)
def hydra_main(cfg: DictConfig) -> None:
    with exit_codes():
        if not cfg.out:
            raise ConfigError("out is not set; name the folder of the results")
        out = folder_to_write("out", str(cfg.out))
        check_count("seed", cfg.seed, least=0)
        check_number("minutes", cfg.minutes, above=True, most=1e6)
        sharders = checked_names("sharder", plain(cfg.sharders), example="sharder=dim")
        if cfg.measured_ranks not in (AUTO, ALL):
            check_count("measured_ranks (a number, auto or all)", cfg.measured_ranks, least=2)
        if cfg.spread != MEASURED:
            check_number("spread (a share, or measured)", cfg.spread, most=1.0)
        cluster = build_cluster(cfg)
        planners = _planners(cfg, sharders, cluster)
        with contextlib.closing(Store(out, _settings(cfg, cluster))) as store:
            try:
                _simulate(cfg, cluster, planners, store)
            except KeyboardInterrupt:
                log.info(
                    "interrupted; the same command goes on from the %d measurements in %s",
                    len(store),
                    out,
                )
                raise


def _planners(
    cfg: DictConfig, names: Sequence[str], cluster: SimulatedCluster
) -> dict[str, Planner]:
    """Build the planners of sharders, with prices that are measured first on this machine."""
    build = functools.partial(_build_planners, names)
    if cfg.hardware != HERE:
        planners = build(cluster.context)
    else:
        with tempfile.TemporaryDirectory() as folder:
            _, planners = measured_here(
                cfg, cluster.context, cluster.task, build, folder=Path(folder)
            )
    return dict(zip(names, planners, strict=True))


def _build_planners(names: Sequence[str], context: RunContext) -> Sequence[Planner]:
    """Build the planners of sharders, which share a cost model; it predicts the exchanges."""
    planners: list[Planner] = []
    cost_model = None
    for name in names:
        cfg = config_of_sharder(CONFIG, name)
        if cfg.get("cost_model") is None:
            raise ConfigError("cost_model is none; a simulation needs one to predict exchanges")
        planner = build_planner(cfg, context, cost_model=cost_model)
        planners.append(dataclasses.replace(planner, value_profiles=None))
        cost_model = planner.cost_model
    return planners


def _simulate(
    cfg: DictConfig, cluster: SimulatedCluster, planners: dict[str, Planner], store: Store
) -> None:
    """Plan, measure or price, simulate, write and show."""
    out, task, gpu = store.folder, cluster.task, cluster.gpu
    write_json(out / "task.json", task.to_json())
    planned, failed = plans_of(planners, task, out)
    draw, source = ids_source(task, cluster.dataset, seed=cfg.seed)
    with busy_neighbors(cluster.num_neighbors):
        dense = _dense(cluster, store)
        if gpu is None:
            ids = drawn_ids(task, draw, num_batches=cluster.measure.num_batches)
            times = _measure(cfg, cluster, planned, ids, store)
        else:
            times = [priced_ranks(entry.cost) for entry in planned]
    if cfg.spread != MEASURED:
        dense = dataclasses.replace(dense, spread=float(cfg.spread))
    priced = price(next(iter(planners.values())).cost_model, task)
    if priced is None:
        log.warning("the cost model predicts no all-reduce of the dense part: it counts as 0 ms")
    equal_ranks = Cluster.of_equal_ranks(
        task,
        dense,
        priced=priced,
        dense_error=DENSE_ERROR if gpu else 0.0,
        overlap=cluster.overlap,
        seed=cfg.seed,
        sharing=cluster.sharing,
    )
    workload = memory_workload(cluster)
    runs = [
        simulate(entry, ranks, equal_ranks, workload)
        for entry, ranks in zip(planned, times, strict=True)
    ]
    measured_on = device_name(cluster.device)
    if cluster.device.type == "cpu":
        measured_on += f" with {counted(torch.get_num_threads(), 'thread')}"
    heading = heading_text(
        task,
        planned[0].report.standing,
        gpu=None if gpu is None else gpu.device_name,
        measured_on=measured_on,
    )
    notes = [*cluster.notes, *([] if gpu else [source]), *_notes(cluster, dense.spread)]
    write_simulation(
        out, heading=heading, notes=notes, settings=store.settings, runs=runs, failed=failed
    )
    for lines in simulation_lines(heading, notes, runs, failed):
        log.info("%s", lines)
    log.info("wrote summary.md, simulation.json, ranks.csv and a folder for each sharder: %s", out)


def _dense(cluster: SimulatedCluster, store: Store) -> DenseTimes:
    """Return the times of the dense part: priced, of the store, or measured."""
    if cluster.gpu is not None:
        return dense_times(cluster)
    return store.kept(
        "the dense part",
        ["dense"],
        read=DenseTimes.from_json,
        measure=lambda: dense_times(cluster),
    )


def _measure(
    cfg: DictConfig,
    cluster: SimulatedCluster,
    planned: Sequence[Planned],
    ids: TableIds,
    store: Store,
) -> list[tuple[RankTimes, ...]]:
    """Measure the ranks of all plans, one after the other, in a job of a single rank."""
    fullest = max(
        sum(shard.weight_bytes for shard in shards)
        for entry in planned
        for shards in entry.plan.shards_by_rank()
    )
    is_limited = cfg.measured_ranks == AUTO
    times = []
    with process_group() as rank:
        bench = RankBench(
            cluster.measure,
            rank.device,
            optimizer=cluster.dense.optimizer.embedding,
            table_bytes=min(fullest, cluster.table_limit_bytes),
        )
        for entry in planned:
            tables = with_precisions(cluster.task, entry.plan).tables
            of_plan = dataclasses.replace(ids, tables={table.name: table for table in tables})
            timer = RankTimer(bench, store, of_plan, limit_bytes=cluster.table_limit_bytes)
            times.append(
                time_ranks(
                    entry,
                    timer.time,
                    count=None if cfg.measured_ranks in (AUTO, ALL) else cfg.measured_ranks,
                    seconds=60 * cfg.minutes / len(planned) if is_limited else math.inf,
                    seed=cfg.seed,
                )
            )
    return times


def _notes(cluster: SimulatedCluster, spread: float) -> Iterator[str]:
    """Yield what the ranks of one host do to each other, and how times vary."""
    if cluster.num_neighbors:
        yield (
            f"{cluster.num_neighbors} other processes computed beside the measured rank, as the "
            "ranks of a host do (neighbors)"
        )
    if cluster.sharing is not None:
        yield (
            f"the {cluster.sharing.ranks_per_host} ranks of a host share cores on which "
            f"{cluster.sharing.ranks_at_once:.3g} compute at full speed (host_cores); real ones "
            "take longer, as sharing is not without loss"
        )
    if spread == 0:
        yield "every step takes the same time on a rank (spread)"
    else:
        yield (
            f"times vary by {100 * spread:.1f} % from step to step (spread), on every rank by "
            "itself, so that ranks wait even under a balanced plan"
        )


def _settings(cfg: DictConfig, cluster: SimulatedCluster) -> dict[str, Any]:
    """Return all that measurements depend on, besides the shards of a rank."""
    task = cluster.task
    text = json.dumps(task.to_json(), sort_keys=True)
    here = {
        "device": device_name(cluster.device),
        "threads": torch.get_num_threads(),
        "measure": dataclasses.asdict(cluster.measure),
        "table_bytes": cluster.table_limit_bytes,
        "neighbors": cluster.num_neighbors,
        "versions": versions(),
    }
    return {
        "world_size": task.topology.world_size,
        "ranks_per_host": task.topology.ranks_per_host,
        "batch_size": task.batch_size,
        "task": hashlib.blake2b(text.encode(), digest_size=8).hexdigest(),
        "data": plain(cfg.get("data")),
        "model": plain(cfg.model),
        "optimizer": plain(cluster.optimizer),
        "overlap": dataclasses.asdict(cluster.overlap),
        "exchange_precision": plain(cfg.exchange_precision),
        "hardware": cfg.hardware,
        "ranks_at_once": None if cluster.sharing is None else cluster.sharing.ranks_at_once,
        "seed": cfg.seed,
        **({} if cluster.gpu else here),
    }


def main() -> None:
    run_with_sharder_list(hydra_main)


if __name__ == "__main__":
    main()
