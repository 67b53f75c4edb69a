"""One training run, from its config to its result. `_train` lists its steps."""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from torch.optim.lr_scheduler import LambdaLR

from dlrm_sharded.calibration.measure import MeasureConfig, MeasuredCost, measure
from dlrm_sharded.commands.memory_check import check_memory, traced_workload, used_text
from dlrm_sharded.commands.planner import build_planner
from dlrm_sharded.context import RunContext
from dlrm_sharded.datasets.base import SPLITS, BatchStream, Dataset, check_batch
from dlrm_sharded.distributed import (
    Rank,
    all_or_none,
    is_restart,
    on_rank_zero,
    patiently_on_rank_zero,
    process_group,
    reported_by_rank_zero,
    with_memory_of_all_ranks,
)
from dlrm_sharded.errors import ConfigError, check_count, check_number
from dlrm_sharded.explain.diagnosis import diagnose
from dlrm_sharded.explain.text import forecast
from dlrm_sharded.json_files import write_json
from dlrm_sharded.model import Dlrm, warn_of_slow_bf16
from dlrm_sharded.plan import ShardingPlan
from dlrm_sharded.plan_report import PlanReport, plan_json
from dlrm_sharded.planning import Planner
from dlrm_sharded.provenance import device_name
from dlrm_sharded.runs.result import OBJECTIVES, run_result, write_result
from dlrm_sharded.runs.run_events import RunWriter
from dlrm_sharded.runs.tags import HPARAMS
from dlrm_sharded.runs.terminal import closing_text, prediction_text
from dlrm_sharded.sharded_model import (
    check_exchange_precision,
    dry_shard_model,
    shard_model,
    sharded_embeddings,
)
from dlrm_sharded.task import GIB, ShardingTask, Topology
from dlrm_sharded.training.memory import RankMemory
from dlrm_sharded.training.optimizers import OptimizerConfig
from dlrm_sharded.training.trainer import Trainer, TrainerConfig, TrainingResult

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class RunSetup:
    """The objects that a run's config describes, except the model and the planner."""

    dataset: Dataset
    topology: Topology
    optimizer: OptimizerConfig
    trainer: TrainerConfig
    measure: MeasureConfig
    batch_size: int
    seed: int
    objective: str


def train(cfg: DictConfig) -> float:
    """Run on all ranks together; return the entry of result.json that `objective` names."""
    # TorchRec uses what torch deprecates (ShardedTensor, a DDP argument); users cannot change that.
    warnings.filterwarnings("ignore", category=FutureWarning, message=".*deprecat")
    try:
        check_number("timeout_s", cfg.timeout_s, least=1)
    except ConfigError as error:
        reported_by_rank_zero(error)
        raise
    with process_group(timeout_s=cfg.timeout_s) as rank:
        return _train(cfg, rank)


def _train(cfg: DictConfig, rank: Rank) -> float:
    run_dir = on_rank_zero(lambda: Path(HydraConfig.get().runtime.output_dir))
    with all_or_none():
        setup = _build(cfg, rank)
        planner = None
        if rank.is_zero:
            context = RunContext(
                device=rank.device.type,
                hardware=device_name(rank.device),
                optimizer=cfg.optimizer.embedding,
            )
            planner = build_planner(
                cfg, context, diagnose=functools.partial(diagnose, alternatives=cfg.explain)
            )
    # A dataset may convert its files at first use, which can take hours on rank 0.
    patiently_on_rank_zero(lambda: setup.dataset.num_batches("train"))
    with all_or_none():
        streams = {
            split: BatchStream(
                setup.dataset,
                split,
                rank=rank.rank,
                world_size=rank.world_size,
                shuffle_seed=setup.seed if split == "train" else None,
            )
            for split in SPLITS
        }
    topology = with_memory_of_all_ranks(setup.topology)
    task = on_rank_zero(lambda: ShardingTask(setup.dataset.tables, topology, setup.batch_size))
    build_model = functools.partial(_build_model, cfg, setup, task)
    with all_or_none():
        workload = traced_workload(
            build_model,
            setup.dataset,
            setup.optimizer,
            setup.trainer,
            setup.measure,
            world_size=rank.world_size,
        )
    plan, report = on_rank_zero(lambda: _plan(planner, task, run_dir))
    refuses = cfg.check_memory and not cfg.dry_run
    memory = check_memory(
        plan, task, workload, rank, run_dir, refuses=refuses, logs_all_ranks=cfg.dry_run
    )
    if cfg.dry_run:
        return _build_dry(build_model, plan, task, rank, run_dir)
    with all_or_none():
        model = build_model(rank.device)
        if rank.is_zero:
            warn_of_slow_bf16(model, rank.device)
    sharded = shard_model(
        model,
        plan,
        task.tables,
        topology,
        seed=setup.seed,
        exchange_precision=cfg.exchange_precision,
    )
    optimizer = setup.optimizer.build(sharded)
    with RunWriter(run_dir, enabled=rank.is_zero) as writer:
        writer.config(OmegaConf.to_yaml(cfg, resolve=True), _hparams(cfg, report))
        measured = _measure(setup, report, task, sharded, rank)
        writer.plan(plan, report, task, measured.cost)
        trainer = Trainer(
            sharded,
            optimizer=optimizer,
            lr_scheduler=LambdaLR(optimizer, setup.optimizer.schedule.factor),
            train_stream=streams["train"],
            eval_stream=streams["val"],
            config=setup.trainer,
            batch_size=setup.batch_size,
            rank=rank,
            log_scalar=writer.scalar,
        )
        result = trainer.run()
        writer.conclude(result)
    if rank.is_zero:
        log.info("%s", used_text(memory, result.peak_gib))
    return on_rank_zero(
        lambda: _conclude(setup, plan, report, measured, result, memory, rank, run_dir)
    )


def _build(cfg: DictConfig, rank: Rank) -> RunSetup:
    for group in ("data", "model", "optimizer", "topology", "sharder", "trainer", "measure"):
        if cfg.get(group) is None:
            raise ConfigError(f"{group} is null; name one of conf/{group}")
    batch_size = cfg.batch_size
    check_count("batch_size", batch_size, least=1)
    check_count("seed", cfg.seed, least=0)
    if cfg.objective not in OBJECTIVES:
        raise ConfigError(f"objective is {cfg.objective!r}; known: {', '.join(OBJECTIVES)}")
    if batch_size % rank.world_size:
        raise ConfigError(
            f"batch_size is {batch_size:,}; it is global and must be a multiple of the "
            f"{rank.world_size} ranks"
        )
    optimizer: OptimizerConfig = instantiate(cfg.optimizer)
    optimizer.check_device(rank.device)
    check_exchange_precision(cfg.exchange_precision, rank.device)
    topology: Topology = instantiate(cfg.topology)
    return RunSetup(
        dataset=instantiate(cfg.data),
        topology=dataclasses.replace(
            topology,
            bytes_per_element=optimizer.bytes_per_element,
            optimizer_bytes_per_row=optimizer.bytes_per_row,
        ),
        optimizer=optimizer,
        trainer=instantiate(cfg.trainer),
        measure=instantiate(cfg.measure),
        batch_size=batch_size,
        seed=cfg.seed,
        objective=cfg.objective,
    )


def _build_model(
    cfg: DictConfig, setup: RunSetup, task: ShardingTask, device: torch.device
) -> Dlrm:
    torch.manual_seed(setup.seed)
    model: Dlrm = instantiate(cfg.model)(task.tables, setup.dataset.num_dense, device=device)
    setup.optimizer.fuse_into(model)
    return model


def _build_dry(
    build_model: Callable[[torch.device], Dlrm],
    plan: ShardingPlan,
    task: ShardingTask,
    rank: Rank,
    run_dir: Path,
) -> float:
    """Build the sharded model without its memory; a run without training has no objective."""
    with all_or_none():
        model = dry_shard_model(build_model(torch.device("meta")), plan, task.tables, task.topology)
    if rank.is_zero:
        log.info(
            "dry run: rank 0 builds %.2f GiB of parameters; plan and memory are in %s",
            sum(parameter.nbytes for parameter in model.parameters()) / GIB,
            run_dir,
        )
    return math.nan


def _plan(
    planner: Planner | None, task: ShardingTask, run_dir: Path
) -> tuple[ShardingPlan, PlanReport]:
    assert planner is not None
    topology = task.topology
    log.info(
        "%d tables, %.2f GiB, on %d ranks of %s; global batch %d",
        len(task.tables),
        task.table_bytes / GIB,
        topology.world_size,
        topology.rank_memory_text,
        task.batch_size,
    )
    plan, report = planner.plan(task)
    if (run_dir / "plan.json").exists() and not is_restart():
        raise ConfigError(f"{run_dir} holds a run already; give another hydra.run.dir")
    write_json(run_dir / "plan.json", plan_json(plan, report))
    write_json(run_dir / "task.json", task.to_json())
    summary_of_plan = f"{report.sharder}: {len(plan.shards)} shards in {report.solve_s:.3f} s"
    log.info("%s", "; ".join(filter(None, [summary_of_plan, forecast(report)])))
    return plan, report


def _measure(
    setup: RunSetup, report: PlanReport, task: ShardingTask, model: torch.nn.Module, rank: Rank
) -> MeasuredCost:
    """Measure the embedding cost on the first batches of the training split."""
    num_batches = min(setup.measure.num_batches, setup.dataset.num_batches("train"))
    batches = [
        setup.dataset.batch("train", i, rank=rank.rank, world_size=rank.world_size).to(rank.device)
        for i in range(num_batches)
    ]
    for batch in batches:
        check_batch(batch, task.tables)
    measured = measure(
        sharded_embeddings(model), [batch.sparse_features for batch in batches], setup.measure
    )
    if rank.is_zero:
        log.info(
            "embedding cost %.2f ms, critical path %.2f ms, imbalance %.2f "
            "(median of %d; interquartile range of forward computation %.0f %%)",
            measured.cost.cost_ms,
            measured.cost.critical_path_ms,
            measured.cost.imbalance,
            measured.iterations,
            100 * measured.spread["fwd_compute"],
        )
        if measured.launch_ms:
            log.info(
                "host time to launch the stages, which is not in their times: %s",
                ", ".join(f"{stage} {ms:.2f} ms" for stage, ms in measured.launch_ms.items()),
            )
        if measured.exposed:
            log.warning(
                "the times of %s contain host time: the host is slow, or waits within them",
                ", ".join(measured.exposed),
            )
        if report.cost is not None:
            log.info("%s", prediction_text(report.cost, measured.cost))
    return measured


def _conclude(
    setup: RunSetup,
    plan: ShardingPlan,
    report: PlanReport,
    measured: MeasuredCost,
    training: TrainingResult,
    memory: Sequence[RankMemory],
    rank: Rank,
    run_dir: Path,
) -> float:
    """Write result.json and return the objective, or nan if the run has no value for it."""
    result = run_result(
        plan,
        report,
        measured,
        training,
        device=device_name(rank.device),
        batch_size=setup.batch_size,
        seed=setup.seed,
        estimated_peak_gib=max(of_rank.total for of_rank in memory) / GIB,
    )
    write_result(run_dir, result)
    on_cuda = rank.device.type == "cuda"
    log.info("%s", closing_text(report, measured.cost, training, run_dir, on_cuda=on_cuda))
    value = getattr(result, setup.objective)
    return math.nan if value is None else float(value)


def _hparams(cfg: DictConfig, report: PlanReport) -> dict[str, str]:
    values = (report.sharder, str(cfg.batch_size), str(cfg.seed))
    return dict(zip(HPARAMS, values, strict=True))
