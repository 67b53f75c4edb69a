"""Train a policy that places tables, with costs of plans on this machine: `dlrm-train-policy`.

dlrm-train-policy policy=dreamshard
dlrm-train-policy policy=autoshard seed=1 costs=predicted
dlrm-train-policy policy=dreamshard init_from=packaged costs=predicted schedule.num_rounds=3

The last one re-tunes the packaged policy to the cost model of this machine, in about a minute.
If training was killed, it continues with the interrupted round when it is started again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig, OmegaConf
from torch.utils.tensorboard import SummaryWriter

from dlrm_sharded.commands.hydra_app import all_but, instantiate, run_command
from dlrm_sharded.commands.sharders import drop_keys_of_replaced_class
from dlrm_sharded.cost import learned
from dlrm_sharded.cost.base import CostModel
from dlrm_sharded.files.errors import ConfigError, check_choice, check_count, check_path
from dlrm_sharded.files.json_files import folder_to_write
from dlrm_sharded.files.progress_bar import ProgressBar
from dlrm_sharded.files.provenance import commit, versions
from dlrm_sharded.hardware.artifact import CALIBRATED, find_artifact, name_in_folder, write_artifact
from dlrm_sharded.hardware.artifact_kinds import policy_kind
from dlrm_sharded.hardware.context import RunContext
from dlrm_sharded.hardware.detect import detect_hardware
from dlrm_sharded.measuring.rank_bench import RankBench, draw_ids, with_measured
from dlrm_sharded.plans.plan import ShardingPlan
from dlrm_sharded.plans.plan_cost import PlanCost
from dlrm_sharded.plans.task import ShardingTask
from dlrm_sharded.ranks.distributed import Rank, process_group
from dlrm_sharded.rl.learned_policy import POLICY_FEATURES, LearnedPolicy, read_net, to_arrays
from dlrm_sharded.rl.nets import PlacementNet
from dlrm_sharded.rl.tasks import TaskPool
from dlrm_sharded.rl.training import MeasurePlan, PolicyTraining, RoundResult
from dlrm_sharded.sharders.base import Sharder
from dlrm_sharded.sharders.heuristics import WEIGHTS, GreedySharder
from dlrm_sharded.sharders.planning import made
from dlrm_sharded.sharders.policy import PolicySharder

log = logging.getLogger("dlrm_sharded.train_policy")
VALIDATION_SEED = 2**32
DECIDES = ("policy", "init_from", "costs", "schedule", "tasks", "measure")
"""Keys that, besides the optimizer, determine the networks."""

CURVES = ("measured_ms", "estimated_ms", "entropy", "cost_error_percent")
"""Figures of a round that TensorBoard shows."""

_logged: set[str] = set()
"""Messages of the cost model that have been logged."""


def train_policy(cfg: DictConfig) -> None:
    """Train a policy, and write it with the mean costs of its plans."""
    torch.set_num_threads(1)
    logging.getLogger(learned.__name__).addFilter(_is_first_of_its_message)
    with process_group() as rank:
        out = folder_to_write("out", cfg.out)
        folder_to_write("log_dir", cfg.log_dir)
        check_count("num_validation_tasks", cfg.num_validation_tasks, least=1)
        pool: TaskPool = instantiate(cfg.tasks)
        hardware, optimizer = detect_hardware(rank), cfg.optimizer.embedding
        context = RunContext(
            rank.device.type, hardware, optimizer, pool.world_size, calibrated=CALIBRATED
        )
        model = _cost_model(cfg, context)
        training = PolicyTraining(instantiate(cfg.policy), pool, instantiate(cfg.schedule))
        initialize(training.net, cfg.init_from, context)
        kind = training.net.kind
        policy = PolicySharder(LearnedPolicy(training.net), name=kind, num_samples=0)
        chosen: Any = OmegaConf.to_container(cfg, resolve=True)
        settings = {"optimizer": optimizer, **{key: chosen[key] for key in DECIDES}}
        mean_ms = _mean_cost(pool, model, cfg.num_validation_tasks)
        scores = {weight: mean_ms(GreedySharder(weight)) for weight in WEIGHTS}
        best = min(scores, key=scores.__getitem__)
        initial_ms = None if cfg.init_from is None else mean_ms(policy)
        name = name_in_folder(out, policy_kind(kind), hardware)
        checkpoint = out / f"{name}.partial"
        # A new training replaces the curves of an earlier one; a resumed one appends to them.
        purge_step = None if checkpoint.exists() else 0
        with (
            SummaryWriter(cfg.log_dir, purge_step=purge_step) as writer,
            ProgressBar(total=training.schedule.num_rounds, unit="round") as bar,
        ):

            def show(finished: RoundResult) -> None:
                cost_ms = mean_ms(policy)
                _add_curves(writer, finished, cost_ms=cost_ms, best_heuristic_ms=scores[best])
                bar.update(finished.number + 1 - bar.n)
                bar.set_postfix_str(f"{cost_ms:.1f} ms, best heuristic {scores[best]:.1f} ms")

            training.run(
                _costs(cfg, pool, model, rank),
                is_trained=cfg.init_from is not None,
                checkpoint=checkpoint,
                settings=settings,
                on_round=show,
            )
        scores[kind] = mean_ms(policy)
        training_s = sum(finished.seconds for finished in training.rounds)
        about = {"training": settings, "scores_ms": scores, "initial_ms": initial_ms}
        meta = _meta(kind, context) | about | {"training_s": round(training_s, 1)}
        path = write_artifact(out, name, to_arrays(training.net), hardware.to_meta() | meta)
        checkpoint.unlink(missing_ok=True)  # it may be gone already
        before = "" if initial_ms is None else f" (before the training {initial_ms:.2f} ms)"
        log.info(
            "trained in %.0f s without measurements; on %d other tasks plans cost %s; wrote %s",
            training_s,
            cfg.num_validation_tasks,
            f"{scores[kind]:.2f} ms{before}, of the best heuristic {best} {scores[best]:.2f} ms",
            path,
        )


def _add_curves(writer: SummaryWriter, finished: RoundResult, **costs_ms: float) -> None:
    """Write the figures of a round, and the costs after it, to TensorBoard."""
    curves = costs_ms | {curve: getattr(finished, curve) for curve in CURVES}
    for curve, value in curves.items():
        writer.add_scalar(f"policy/{curve}", value, finished.number + 1)


def unused(cfg: DictConfig) -> dict[str, str]:
    """Declare which keys have no effect on training, and why."""
    reasons = all_but(cfg, "optimizer", "embedding")
    if cfg.costs != "measured":
        reasons["measure"] = "costs=predicted measures nothing; costs=measured does"
    return reasons


def main() -> None:
    run_command(train_policy, "train_policy", unused=unused)


def initialize(net: PlacementNet, init_from: str | None, context: RunContext) -> None:
    """Load the weights of a trained policy into the networks.

    Args:
        init_from: "packaged" for the packaged policy that fits the hardware best, or the file of a
            policy; None to keep the random weights.

    Raises:
        ConfigError: `init_from` is no path.
        DataError: there is no such policy, or it is damaged.
    """
    if init_from is None:
        return
    check_path("init_from", init_from)
    path = Path(init_from)
    if init_from == "packaged":
        path = find_artifact(policy_kind(net.kind), context.hardware, context.device)
    net.load_state_dict(read_net(net.kind, path).state_dict())


def _is_first_of_its_message(record: logging.LogRecord) -> bool:
    """Return whether a message was not logged before; some warnings repeat for every plan."""
    is_first = record.msg not in _logged
    _logged.add(record.msg)
    return is_first


def _mean_cost(pool: TaskPool, model: CostModel, num_tasks: int) -> Callable[[Sharder], float]:
    """Return a function that gives a sharder's mean predicted cost on tasks kept for validation."""
    rng = np.random.default_rng(VALIDATION_SEED)
    tasks = [pool.task(pool.draw(rng)) for _ in range(num_tasks)]
    return lambda sharder: fmean(model.predict(sharder.shard(t), t).cost_ms for t in tasks)


def _cost_model(cfg: DictConfig, context: RunContext) -> CostModel:
    check_choice("costs", cfg.costs, ("measured", "predicted"))
    if cfg.get("cost_model") is None:
        raise ConfigError(
            "cost_model is none, and the training predicts costs; set cost_model=learned"
        )
    given = instantiate(drop_keys_of_replaced_class(cfg, "cost_model"))
    model: CostModel = made("cost_model", given, context, method="predict")
    return model


def _meta(kind: str, context: RunContext) -> dict[str, Any]:
    """Return an artifact's metadata of a policy, without its hardware and its training."""
    return {
        "kind": kind,
        "device": context.device,
        "optimizer": context.optimizer,
        "features": POLICY_FEATURES,
        "versions": versions(),
        "commit": commit(),
    }


def _costs(cfg: DictConfig, pool: TaskPool, model: CostModel, rank: Rank) -> MeasurePlan:
    if cfg.costs == "predicted":
        return lambda task, ranks: model.predict(ShardingPlan.from_ranks(task, ranks), task)
    bench = RankBench(
        instantiate(cfg.measure),
        rank.device,
        table_bytes=pool.rank_bytes,
        optimizer=cfg.optimizer.embedding,
    )
    rng = np.random.default_rng(cfg.seed)

    def measured(task: ShardingTask, ranks: Sequence[int]) -> PlanCost:
        """Measure the computation of a plan, rank after rank, and predict its exchanges."""
        plan = ShardingPlan.from_ranks(task, ranks)
        ids = draw_ids(
            task.tables,
            batch_size=task.batch_size,
            num_batches=cfg.measure.num_batches,
            seed=int(rng.integers(2**32)),
            accesses=pool.accesses(task),
            num_ranks=plan.world_size,
        )
        rounds = bench.measure_rounds(plan.shards_by_rank(), ids)
        return with_measured(model.predict(plan, task), rounds)

    return measured


if __name__ == "__main__":
    main()
