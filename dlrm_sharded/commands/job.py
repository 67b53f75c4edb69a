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
from omegaconf import DictConfig, OmegaConf
from torch.optim.lr_scheduler import LambdaLR

from dlrm_sharded.calibration.measure import MeasuredCost
from dlrm_sharded.calibration.picture import run_journal
from dlrm_sharded.calibration.step_journal import correction_of
from dlrm_sharded.checkpoint.folder import set_aside
from dlrm_sharded.checkpoint.manifest import RunState
from dlrm_sharded.checkpoint.model_state import ModelState, model_state, set_fused_steps
from dlrm_sharded.checkpoint.restore import load_model, load_weights
from dlrm_sharded.commands.own_folder import write_hydra_files
from dlrm_sharded.commands.planner import build_planner
from dlrm_sharded.commands.run_setup import RunSetup, build_model, build_setup
from dlrm_sharded.datasets.base import SPLITS, BatchStream
from dlrm_sharded.explain.diagnosis import diagnose
from dlrm_sharded.files.errors import (
    ConfigError,
    UnsavedError,
    check_number,
)
from dlrm_sharded.files.provenance import device_name, fbgemm_version, versions
from dlrm_sharded.hardware.context import RunContext
from dlrm_sharded.hardware.detect import detect_hardware
from dlrm_sharded.job.measure import measure_run, note_run
from dlrm_sharded.job.memory_check import (
    check_memory,
    traced_workload,
    used_text,
    write_memory,
)
from dlrm_sharded.job.plan import RunPlan, plan_run, write_plan
from dlrm_sharded.job.predicted_step import (
    measure_dense_part,
    note_step,
    predict_run,
    step_journal,
)
from dlrm_sharded.job.start import (
    Start,
    check_length,
    find_start,
    note_start,
    owned,
    plain_config,
)
from dlrm_sharded.job.trace_report import report_trace
from dlrm_sharded.model import Dlrm, warn_of_slow_bf16
from dlrm_sharded.model.sharded_model import (
    dry_shard_model,
    shard_model,
)
from dlrm_sharded.plans.plan import ShardingPlan, with_precisions
from dlrm_sharded.plans.plan_report import PlanReport, plan_json
from dlrm_sharded.plans.task import GIB, ShardingTask
from dlrm_sharded.ranks.distributed import (
    Rank,
    all_or_none,
    on_rank_zero,
    patiently_on_rank_zero,
    process_group,
    reported_by_rank_zero,
    with_memory_of_all_ranks,
)
from dlrm_sharded.runs.result import run_result, write_result
from dlrm_sharded.runs.run_events import RunWriter
from dlrm_sharded.runs.tags import HPARAMS
from dlrm_sharded.runs.terminal import closing_text
from dlrm_sharded.sharders.planning import Planner
from dlrm_sharded.step.prediction import StepPrediction
from dlrm_sharded.training.checkpoints import Checkpoints
from dlrm_sharded.training.memory import RankMemory
from dlrm_sharded.training.progress import Progress, read_progress
from dlrm_sharded.training.trainer import Trainer, TrainingResult

log = logging.getLogger(__name__)

MAX_TIMEOUT_S = 1e8
"""Limit of the time that a rank waits for the others: three years."""


def train(cfg: DictConfig) -> float:
    """Run on all ranks together; return the entry of result.json that `objective` names."""
    # TorchRec uses what torch deprecates (ShardedTensor, a DDP argument); users cannot change that.
    warnings.filterwarnings("ignore", category=FutureWarning, message=".*deprecat")
    # FBGEMM differentiates its dense lookup on CPUs without registering that with autograd.
    warnings.filterwarnings("ignore", category=UserWarning, message="fbgemm::dense_embedding")
    try:
        check_number("timeout_s", cfg.timeout_s, least=1, most=MAX_TIMEOUT_S)
    except ConfigError as error:
        reported_by_rank_zero(error)
        raise
    with process_group(timeout_s=cfg.timeout_s) as rank:
        run_dir = on_rank_zero(lambda: Path(HydraConfig.get().runtime.output_dir))
        with owned(run_dir, rank) as check_owner:
            return _train(cfg, rank, run_dir, check_owner)


def _train(cfg: DictConfig, rank: Rank, run_dir: Path, check_owner: Callable[[], None]) -> float:
    with all_or_none():
        setup = build_setup(cfg, rank)
    context = RunContext(
        device=rank.device.type,
        hardware=detect_hardware(rank),
        optimizer=cfg.optimizer.embedding,
        ranks_per_host=rank.local_world_size,
        fbgemm=fbgemm_version(versions()),
    )
    with all_or_none():
        journal = run_journal(context, cfg.journal)
        planner = _planner(cfg, context) if rank.is_zero else None
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
        check_length(start, setup.trainer, len(streams["train"]))
    topology = with_memory_of_all_ranks(setup.topology)
    task = on_rank_zero(lambda: setup.task(topology))
    on_device = functools.partial(build_model, cfg, setup, task)
    with all_or_none():
        workload = traced_workload(
            on_device,
            setup.dataset,
            setup.optimizer,
            setup.trainer,
            setup.measure,
            world_size=rank.world_size,
        )
    planned = on_rank_zero(lambda: plan_run(planner, task, start, cfg))
    memory = check_memory(
        planned.plan,
        task,
        workload,
        rank,
        checkpoint=setup.trainer.checkpoint,
        refuses=cfg.check_memory and not cfg.dry_run,
        logs_all_ranks=cfg.dry_run,
    )
    begin = functools.partial(_begin, cfg, run_dir, start, planned, task, memory.ranks, check_owner)
    task = with_precisions(task, planned.plan)
    on_device = functools.partial(build_model, cfg, setup, task)
    if cfg.dry_run:
        on_rank_zero(begin)
        return _build_dry(on_device, planned.plan, task, rank, run_dir)
    if start.resumed is None:  # a run that fails from here on leaves its plan
        on_rank_zero(begin)
    dense = measure_dense_part(
        on_device, setup, task, streams["train"], rank, first_step=start.step
    )
    with all_or_none():
        model = on_device(rank.device)
        if rank.is_zero:
            warn_of_slow_bf16(model, rank.device)
    sharded = shard_model(
        model,
        planned.plan,
        task.tables,
        topology,
        seed=setup.seed,
    )
    optimizer = setup.optimizer.build(sharded)
    state = model_state(
        sharded, optimizer, planned.plan, task.tables, embedding_optimizer=setup.optimizer.embedding
    )
    measured = measure_run(setup, planned.report, task, sharded, optimizer, rank)
    if rank.is_zero:
        note_run(journal, context, planned.plan, task, measured.cost)
    steps = step_journal(journal, context, setup.trainer, rank)
    correction = on_rank_zero(lambda: correction_of(steps.read() if steps else []))
    prediction = predict_run(
        planned.report, measured.cost, dense, setup, rank, correction=correction
    )
    progress = _load(start, state, sharded, rank, same_plan=not planned.is_new)
    if start.resumed is not None:  # nothing of the former run has changed before
        on_rank_zero(begin)
    with RunWriter(run_dir, enabled=rank.is_zero, going_on=start.event_position) as writer:
        writer.config(OmegaConf.to_yaml(cfg, resolve=True), _hparams(cfg, planned.report))
        writer.step(prediction.predicted, is_new=planned.is_new)
        writer.plan(
            planned.plan,
            planned.report,
            task,
            measured.cost,
            step=start.step,
            is_new=planned.is_new,
        )
        run_state = functools.partial(
            _run_state,
            RunState(
                run=start.run,
                step=0,
                batch_size=setup.batch_size,
                seed=setup.seed,
                epoch_batches=len(streams["train"]),
                world_size=rank.world_size,
                optimizers={key: cfg.optimizer[key] for key in ("embedding", "dense")},
                column_bounds=state.column_bounds,
                buffers=state.buffers,
                progress={},
                plan=plan_json(planned.plan, planned.report),
                config=plain_config(cfg),
            ),
            writer,
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
            checkpoints=Checkpoints.if_enabled(
                run_dir,
                setup.trainer.checkpoint,
                state,
                describe=run_state,
                rank=rank,
                in_background=memory.has_checkpoint_copy,
                check_owner=check_owner,
            ),
            start=progress,
            conclude_trace=functools.partial(
                report_trace,
                run_dir=run_dir,
                plan=planned.plan,
                report=planned.report,
                task=task,
                measured=measured.cost,
                writer=writer,
            ),
        )
        result = trainer.run()
        writer.conclude(result)
    if rank.is_zero:
        log.info("%s", used_text(memory.ranks, result.peak_gib))
        note_step(steps, prediction, result.step_ms)
    predicted = prediction.predicted
    return on_rank_zero(
        lambda: _conclude(
            setup,
            planned,
            measured,
            predicted,
            result,
            start,
            memory.ranks,
            rank,
            run_dir,
            check_owner,
        )
    )


def _planner(cfg: DictConfig, context: RunContext) -> Planner:
    return build_planner(
        cfg, context, diagnose=functools.partial(diagnose, alternatives=cfg.explain)
    )


def _begin(
    cfg: DictConfig,
    run_dir: Path,
    start: Start,
    planned: RunPlan,
    task: ShardingTask,
    memory: Sequence[RankMemory],
    check_owner: Callable[[], None],
) -> None:
    """Write to the run's folder what is known before the first step; rank 0 calls it."""
    check_owner()
    write_hydra_files(cfg, run_dir)
    write_plan(run_dir, planned, task)
    write_memory(run_dir, memory)
    if not cfg.dry_run:
        set_aside(start.damaged)
        note_start(run_dir, start, task.topology.world_size)


def _run_state(base: RunState, writer: RunWriter, progress: Progress) -> RunState:
    """Describe the run after the steps that it has trained."""
    return dataclasses.replace(
        base, step=progress.step, progress=progress.to_json(), events=writer.position()
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


def _conclude(
    setup: RunSetup,
    planned: RunPlan,
    measured: MeasuredCost,
    prediction: StepPrediction | None,
    training: TrainingResult,
    start: Start,
    memory: Sequence[RankMemory],
    rank: Rank,
    run_dir: Path,
    check_owner: Callable[[], None],
) -> float:
    """Write result.json and return the objective, or nan if the run has no value for it.

    Raises:
        LostFolderError: another job has taken the folder over.
        UnsavedError: the result or the last checkpoint could not be written.
    """
    result = run_result(
        planned.plan,
        planned.report,
        measured,
        prediction,
        training,
        device=device_name(rank.device),
        batch_size=setup.batch_size,
        seed=setup.seed,
        interruptions=start.num_interruptions,
        estimated_peak_gib=max(of_rank.total for of_rank in memory) / GIB,
    )
    on_cuda = rank.device.type == "cuda"
    log.info(
        "%s",
        closing_text(planned.report, measured.cost, prediction, training, run_dir, on_cuda=on_cuda),
    )
    try:
        check_owner()
        write_result(run_dir, result)
    except (ConfigError, OSError) as error:
        raise UnsavedError(f"the training is finished, but its result is lost: {error}") from error
    if training.unsaved is not None:
        raise UnsavedError(
            "the training is finished, but its last checkpoint could not be written: "
            f"{training.unsaved}"
        )
    value = getattr(result, setup.objective)
    return math.nan if value is None else float(value)


def _hparams(cfg: DictConfig, report: PlanReport) -> dict[str, str]:
    values = (report.sharder, str(cfg.batch_size), str(cfg.seed))
    return dict(zip(HPARAMS, values, strict=True))
