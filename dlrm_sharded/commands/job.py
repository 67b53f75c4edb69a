"""One training run, from its config to its result. `_train` lists its steps."""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import warnings
from pathlib import Path

import torch
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from torch.optim.lr_scheduler import LambdaLR

from dlrm_sharded.calibration.measure import MeasureConfig, MeasuredCost, measure
from dlrm_sharded.checkpoint.manifest import RunState
from dlrm_sharded.checkpoint.model_state import ModelState, model_state, set_fused_steps
from dlrm_sharded.checkpoint.restore import load_model, load_weights
from dlrm_sharded.commands.dataset import build_dataset
from dlrm_sharded.commands.planner import build_planner
from dlrm_sharded.commands.start import Start, find_start, note_start, plain_config
from dlrm_sharded.context import RunContext
from dlrm_sharded.datasets.base import SPLITS, BatchStream, Dataset, check_batch
from dlrm_sharded.distributed import (
    Rank,
    all_or_none,
    on_rank_zero,
    patiently_on_rank_zero,
    process_group,
    reported_by_rank_zero,
    with_memory_of_all_ranks,
)
from dlrm_sharded.errors import (
    CheckpointError,
    ConfigError,
    InvalidPlanError,
    UnsavedError,
    check_count,
    check_number,
)
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
from dlrm_sharded.sharded_model import check_exchange_precision, shard_model, sharded_embeddings
from dlrm_sharded.task import GIB, MAX_BATCH_SIZE, ShardingTask, Topology
from dlrm_sharded.training.checkpoints import Checkpoints
from dlrm_sharded.training.optimizers import OptimizerConfig
from dlrm_sharded.training.progress import Progress, read_progress
from dlrm_sharded.training.trainer import Trainer, TrainerConfig, TrainingResult

log = logging.getLogger(__name__)

MAX_TIMEOUT_S = 1e8
"""Limit of the time that a rank waits for the others: three years."""


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
        check_number("timeout_s", cfg.timeout_s, least=1, most=MAX_TIMEOUT_S)
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
    start = find_start(cfg, run_dir, rank)
    with all_or_none():
        _check_length(setup, start, len(streams["train"]))
    topology = with_memory_of_all_ranks(setup.topology)
    task = on_rank_zero(lambda: ShardingTask(setup.dataset.tables, topology, setup.batch_size))
    with all_or_none():
        torch.manual_seed(setup.seed)
        model: Dlrm = instantiate(cfg.model)(
            task.tables, setup.dataset.num_dense, device=rank.device
        )
        setup.optimizer.fuse_into(model)
        if rank.is_zero:
            warn_of_slow_bf16(model, rank.device)
    plan, report = on_rank_zero(
        lambda: _plan(planner, task, run_dir, start.plan_to_keep(cfg, rank.world_size), start)
    )
    sharded = shard_model(
        model,
        plan,
        task.tables,
        topology,
        seed=setup.seed,
        exchange_precision=cfg.exchange_precision,
    )
    optimizer = setup.optimizer.build(sharded)
    state = model_state(
        sharded, optimizer, plan, task.tables, embedding_optimizer=setup.optimizer.embedding
    )
    with RunWriter(run_dir, enabled=rank.is_zero, going_on=start.event_position) as writer:
        writer.config(OmegaConf.to_yaml(cfg, resolve=True), _hparams(cfg, report))
        measured = _measure(setup, report, task, sharded, rank)
        is_new = start.resumed is None or plan != ShardingPlan.from_json(start.resumed.state.plan)
        writer.plan(plan, report, task, measured.cost, step=start.step, is_new=is_new)
        progress = _load(start, state, sharded, rank, same_plan=not is_new)
        checkpoints = None
        if setup.trainer.checkpoint is not None and setup.trainer.checkpoint.is_enabled:

            def describe(progress: Progress) -> RunState:
                return RunState(
                    run=start.run,
                    step=progress.step,
                    batch_size=setup.batch_size,
                    seed=setup.seed,
                    epoch_batches=len(streams["train"]),
                    world_size=rank.world_size,
                    optimizers={
                        "embedding": setup.optimizer.embedding,
                        "dense": setup.optimizer.dense,
                    },
                    column_bounds=state.column_bounds,
                    progress=progress.to_json(),
                    plan=plan_json(plan, report),
                    config=plain_config(cfg),
                    events=writer.position(),
                )

            checkpoints = Checkpoints(
                run_dir, setup.trainer.checkpoint, state, describe=describe, rank=rank
            )
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
            checkpoints=checkpoints,
            start=progress,
        )
        result = trainer.run()
        writer.conclude(result)
    objective = on_rank_zero(
        lambda: _conclude(setup, plan, report, measured, result, start, rank, run_dir)
    )
    if checkpoints is not None and checkpoints.failure is not None:
        raise reported_by_rank_zero(
            UnsavedError(
                f"the training is finished, but its last checkpoint could not be written: "
                f"{checkpoints.failure}"
            )
        )
    return objective


def _check_length(setup: RunSetup, start: Start, epoch_batches: int) -> None:
    """Check that the checkpoint lies within the training, and the epochs have kept their length."""
    if start.resumed is None:
        return
    folder, state = start.resumed.folder, start.resumed.state
    if state.epoch_batches != epoch_batches:
        raise CheckpointError(
            f"{folder} was trained on epochs of {state.epoch_batches:,} batches, the data now has "
            f"{epoch_batches:,}, in another order; take the weights alone with init_from"
        )
    total = setup.trainer.total_steps(epoch_batches)
    if state.step > total:
        raise CheckpointError(
            f"{folder} was trained for {state.step:,} steps, and the run ends after {total:,}; "
            "raise trainer.num_steps or trainer.num_epochs"
        )


def _load(
    start: Start, state: ModelState, model: torch.nn.Module, rank: Rank, *, same_plan: bool
) -> Progress:
    """Load what the run begins from; return where it goes on."""
    if start.weights is not None:
        load_weights(start.weights, state)
    if start.resumed is None:
        return Progress()
    load_model(start.resumed, state)
    set_fused_steps(model, start.step)
    with all_or_none():
        return read_progress(start.resumed, rank, same_plan=same_plan)


def _build(cfg: DictConfig, rank: Rank) -> RunSetup:
    for group in ("data", "model", "optimizer", "topology", "sharder", "trainer", "measure"):
        if cfg.get(group) is None:
            raise ConfigError(f"{group} is null; name one of conf/{group}")
    batch_size = cfg.batch_size
    check_count("batch_size", batch_size, least=1, most=MAX_BATCH_SIZE)
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
        dataset=build_dataset(cfg),
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


def _plan(
    planner: Planner | None,
    task: ShardingTask,
    run_dir: Path,
    kept: ShardingPlan | None,
    start: Start,
) -> tuple[ShardingPlan, PlanReport]:
    """Make a plan, unless an interrupted run goes on with the one that is kept."""
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
    plan, report = _kept_or_new(planner, task, kept, start)
    note_start(run_dir, start, task.topology.world_size)
    if plan is kept:
        log.info("the run goes on with its plan")
    write_json(run_dir / "plan.json", plan_json(plan, report))
    write_json(run_dir / "task.json", task.to_json())
    summary_of_plan = f"{report.sharder}: {len(plan.shards)} shards in {report.solve_s:.3f} s"
    log.info("%s", "; ".join(filter(None, [summary_of_plan, forecast(report)])))
    return plan, report


def _kept_or_new(
    planner: Planner, task: ShardingTask, kept: ShardingPlan | None, start: Start
) -> tuple[ShardingPlan, PlanReport]:
    if kept is not None and start.resumed is not None:
        try:
            return planner.adopt(kept, task, solve_s=start.resumed.state.plan["solve_s"])
        except InvalidPlanError as error:
            log.warning("the checkpoint's plan does not fit any more: %s; a new one is made", error)
    return planner.plan(task)


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
    start: Start,
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
        interruptions=start.num_interruptions,
    )
    on_cuda = rank.device.type == "cuda"
    log.info("%s", closing_text(report, measured.cost, training, run_dir, on_cuda=on_cuda))
    try:
        write_result(run_dir, result)
    except ConfigError as error:
        raise UnsavedError(f"the training is finished, but its result is lost: {error}") from error
    value = getattr(result, setup.objective)
    return math.nan if value is None else float(value)


def _hparams(cfg: DictConfig, report: PlanReport) -> dict[str, str]:
    values = (report.sharder, str(cfg.batch_size), str(cfg.seed))
    return dict(zip(HPARAMS, values, strict=True))
