"""Simulate a cluster on one device: the command `dlrm-simulate`.

dlrm-simulate data=dlrm_datasets_pool topology.world_size=128 topology.ranks_per_host=8 \
    sharder=random,neuroshard out=FOLDER

Each rank's lookups run here, one rank after another; with `hardware=h100_sxm`, the prior of that
GPU prices them. The same command goes on with a simulation that was interrupted.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import hydra
import torch
from omegaconf import DictConfig

from dlrm_sharded.calibration.rank_bench import RankBench, TableIds
from dlrm_sharded.commands.exit_codes import exit_codes
from dlrm_sharded.commands.hydra_app import CONF_DIR, run_hydra
from dlrm_sharded.commands.sharders import (
    build_planner,
    config_of_sharder,
    plain,
    with_sharder_list,
)
from dlrm_sharded.commands.simulated_cluster import (
    SimulatedCluster,
    build_cluster,
    dense_times,
    memory_workload,
)
from dlrm_sharded.commands.words import checked_names
from dlrm_sharded.cost.base import price
from dlrm_sharded.dense.gpu_prices import DENSE_ERROR
from dlrm_sharded.files.errors import ConfigError, DataError, check_count, check_number
from dlrm_sharded.files.json_files import folder_to_write, write_json
from dlrm_sharded.files.provenance import device_name, versions
from dlrm_sharded.plans.plan import with_precisions
from dlrm_sharded.plans.plan_report import PlanReport
from dlrm_sharded.ranks.distributed import process_group
from dlrm_sharded.sharders.planning import Planner
from dlrm_sharded.simulation.accesses import drawn_ids, ids_source
from dlrm_sharded.simulation.cluster import Cluster, SimulatedRun, simulate
from dlrm_sharded.simulation.files import write_simulation
from dlrm_sharded.simulation.neighbors import busy_neighbors
from dlrm_sharded.simulation.plans import Planned, plans_of
from dlrm_sharded.simulation.ranks import (
    RankTimer,
    RankTimes,
    priced_ranks,
    time_ranks,
)
from dlrm_sharded.simulation.store import Store
from dlrm_sharded.simulation.text import comparison, details, measured_heading, priced_heading
from dlrm_sharded.step.parts import DenseTimes
from dlrm_sharded.step.prediction import DensePart

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
        _check_measured_ranks(cfg.measured_ranks)
        if cfg.spread != MEASURED:
            check_number("spread (a share, or measured)", cfg.spread, most=1.0)
        cluster = build_cluster(cfg)
        planners = {name: _planner(name, cluster) for name in sharders}
        settings = _settings(cfg, cluster)
        store = Store(out, settings)
        try:
            _simulate(cfg, cluster, planners, store, settings)
        except KeyboardInterrupt:
            log.info(
                "interrupted; the same command goes on from the %d measurements in %s",
                len(store),
                out,
            )
            raise
        finally:
            store.close()


def _simulate(
    cfg: DictConfig,
    cluster: SimulatedCluster,
    planners: Mapping[str, Planner],
    store: Store,
    settings: Mapping[str, Any],
) -> None:
    """Plan, measure or price, simulate and write."""
    out, task = store.folder, cluster.task
    write_json(out / "task.json", task.to_json())
    planned, failed = plans_of(planners, task, out)
    model = next(iter(planners.values())).cost_model
    draw, source = ids_source(task, cluster.dataset, seed=cfg.seed)
    ids = drawn_ids(task, draw, num_batches=cluster.measure.num_batches)
    dense = _dense(cluster, store)
    if cfg.spread != MEASURED:
        dense = dataclasses.replace(dense, spread=float(cfg.spread))
    all_reduce_ms = 0.0
    if (priced := price(model, task)) is not None:
        all_reduce_ms = priced.all_reduce_ms(dense.gradient_bytes)
    else:
        log.warning("the cost model predicts no all-reduce of the dense part: it counts as 0 ms")
    simulated = Cluster(
        task=task,
        dense=DensePart(
            (dense,) * task.topology.world_size, all_reduce_ms, DENSE_ERROR if cluster.gpu else 0.0
        ),
        overlap=cluster.overlap,
        workload=memory_workload(cluster),
        seed=cfg.seed,
        sharing=cluster.sharing,
    )
    times = (
        [priced_ranks(entry.predicted) for entry in planned]
        if cluster.gpu
        else _measure(cfg, cluster, planned, ids, store)
    )
    runs = [
        simulate(
            entry.sharder,
            entry.plan,
            entry.report,
            ranks,
            simulated,
            cost_error=_cost_error(entry.report) if cluster.gpu else None,
        )
        for entry, ranks in zip(planned, times, strict=True)
    ]
    heading = _heading(cluster, planned[0].report)
    notes = [*cluster.notes, *([] if cluster.gpu else [source]), *_host_notes(cluster)]
    notes.append(_spread_note(dense.spread))
    write_simulation(out, heading=heading, notes=notes, settings=settings, runs=runs, failed=failed)
    _show(heading, notes, runs, failed, out)


def _planner(name: str, cluster: SimulatedCluster) -> Planner:
    """Build the planner of a sharder; ConfigError without prices, as nothing predicts exchanges."""
    planner = build_planner(config_of_sharder(CONFIG, name), cluster.context)
    if planner.cost_model is None:
        raise ConfigError("cost_model is none; a simulation needs one to predict exchanges")
    return dataclasses.replace(planner, value_profiles=None)


def _dense(cluster: SimulatedCluster, store: Store) -> DenseTimes:
    """Return the times of the dense part: priced, of the store, or measured."""
    if cluster.gpu is not None:
        return dense_times(cluster)
    key = store.key("dense")
    known = store.get(key)
    if known is not None:
        try:
            return DenseTimes.from_json(known)
        except DataError as error:
            log.warning("the dense part is measured again: its times are damaged (%s)", error)
    with busy_neighbors(cluster.num_neighbors):
        times = dense_times(cluster)
    store.put(key, times.to_json())
    return times


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
    times = []
    with busy_neighbors(cluster.num_neighbors), process_group() as rank:
        bench = RankBench(
            cluster.measure,
            rank.device,
            optimizer=cluster.dense.optimizer.embedding,
            table_bytes=min(fullest, cluster.table_limit_bytes),
        )
        for entry in planned:
            task = with_precisions(cluster.task, entry.plan)
            of_plan = dataclasses.replace(ids, tables={table.name: table for table in task.tables})
            timer = RankTimer(bench, store, of_plan, limit_bytes=cluster.table_limit_bytes)
            times.append(
                time_ranks(
                    entry.plan,
                    entry.predicted,
                    timer.time,
                    count=None if cfg.measured_ranks in (AUTO, ALL) else cfg.measured_ranks,
                    seconds=60 * cfg.minutes / len(planned)
                    if cfg.measured_ranks == AUTO
                    else math.inf,
                    seed=cfg.seed,
                    name=entry.sharder,
                )
            )
    return times


def _check_measured_ranks(value: Any) -> None:
    if value not in (AUTO, ALL):
        check_count("measured_ranks (a number, auto or all)", value, least=2)


def _host_notes(cluster: SimulatedCluster) -> Iterator[str]:
    """Yield what the ranks of one host do to each other."""
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


def _spread_note(spread: float) -> str:
    if spread == 0:
        return "every step takes the same time on a rank (spread)"
    return (
        f"times vary by {100 * spread:.1f} % from step to step (spread), on every rank by itself, "
        "so that ranks wait even under a balanced plan"
    )


def _cost_error(report: PlanReport) -> float | None:
    return None if report.standing is None else report.standing.error


def _heading(cluster: SimulatedCluster, report: PlanReport) -> str:
    prices = "no standing" if report.standing is None else report.standing.short_text
    if cluster.gpu is not None:
        return priced_heading(cluster.task, gpu=cluster.gpu.device_name, prices=prices)
    if report.standing is not None:
        prices = f"prices of {report.standing.hardware}: {prices}"
    return measured_heading(
        cluster.task,
        device=device_name(cluster.device),
        threads=torch.get_num_threads(),
        prices=prices,
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


def _show(
    heading: str,
    notes: Sequence[str],
    runs: Sequence[SimulatedRun],
    failed: Mapping[str, str],
    out: Path,
) -> None:
    """Log the comparison, and what limits each sharder."""
    log.info("%s", "\n".join([heading, *(f"note: {note}" for note in notes)]))
    log.info("sharders:\n%s", "\n".join(comparison(runs, failed)))
    for run in runs:
        log.info("%s: %s", run.sharder, "\n  ".join(details(run)))
    log.info("wrote summary.md, simulation.json, ranks.csv and a folder for each sharder: %s", out)


def main() -> None:
    def start() -> None:
        sys.argv[1:] = with_sharder_list(sys.argv[1:])
        hydra_main()

    run_hydra(start)


if __name__ == "__main__":
    main()
