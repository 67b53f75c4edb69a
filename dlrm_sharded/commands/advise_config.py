"""Turns the config of dlrm-advise into a question."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, open_dict

from dlrm_sharded.commands.first_start import measured_here
from dlrm_sharded.commands.hydra_app import command_line, instantiate, refuse_unused
from dlrm_sharded.commands.messages import readable_message
from dlrm_sharded.commands.sharders import asked_precision, build_planner, plain, run_context
from dlrm_sharded.commands.step_model import build_dense
from dlrm_sharded.commands.task import (
    HERE,
    AskedTask,
    build_dataset,
    check_batch_size,
    check_question,
    stated_topology,
    task_of_file,
)
from dlrm_sharded.commands.words import checked_names
from dlrm_sharded.commands.yamls import option_node, options_of
from dlrm_sharded.datasets.base import Dataset
from dlrm_sharded.datasets.synthetic import SyntheticDataset
from dlrm_sharded.files.errors import ConfigError, check_count
from dlrm_sharded.hardware.artifact import CALIBRATED, has_artifact
from dlrm_sharded.hardware.artifact_kinds import policy_kind
from dlrm_sharded.hardware.context import RunContext
from dlrm_sharded.model.optimizers import OptimizerConfig
from dlrm_sharded.plans.table_optimizers import memory_of
from dlrm_sharded.plans.task import ShardingTask, Topology
from dlrm_sharded.plans.task_keys import MAX_BATCH_SIZE, MAX_RANKS
from dlrm_sharded.ranks.devices import device_type
from dlrm_sharded.ranks.workers import Refusal
from dlrm_sharded.sharders.planning import Planner
from dlrm_sharded.simulation.candidates import MOST_BOX_S, Case, Question
from dlrm_sharded.simulation.machines import Machine, TableMemory, machine_of, with_prices

DEFAULT_SHARDER = "neuroshard"
NOT_COMPARED = ("plan_file",)
POLICIES = {
    f"{method}{suffix}": method
    for method in ("autoshard", "dreamshard")
    for suffix in ("", "_portfolio")
}
"""Methods of the sharders that need a trained policy, by the sharder."""

DEFAULT_BATCH_SIZE = 65_536

SEARCH_SHARE, TIMEOUT_SHARE = 0.4, 0.8
"""Parts of a case's time for a search, and for a planner that ends with an error afterwards."""

KEYS_OF_RUN = ("data", "model", "optimizer", "exchange_precision", "seed")
KEYS_OF_RUN_TOPOLOGY = ("topology.host_memory_gib", "topology.host_gb_per_s")
"""Keys that mean the same to dlrm-train; what else a run needs differs between candidates."""

GPU_PRICES = {"_target_": "dlrm_sharded.cost.learned.prior_cost_model", "_partial_": True}
"""Cost model of GPUs: calibrated prices would be of one of them alone."""


def stated_task(cfg: DictConfig) -> AskedTask | None:
    """Return the task of the file to advise on; None to advise on data.

    Raises:
        ConfigError: a config names both or none, or the file cannot be used.
    """
    check_question(cfg, "advise on")
    if cfg.get("cost_model") is None:
        raise ConfigError("cost_model is none; advice needs prices: cost_model=learned")
    asked_precision(cfg)  # once, and not for every case
    # the machines decide what the ranks compute on
    return None if cfg.task is None else task_of_file(cfg, compute_device="cuda")


def question_of(
    cfg: DictConfig, of_file: AskedTask | None, *, folder: Path | None = None
) -> tuple[Question, float | None]:
    """Return the question of a config, and the samples of an epoch if they are known.

    Args:
        folder: keeps what is measured of this machine, until the question is answered; None
            measures nothing.

    Raises:
        ConfigError: a value cannot be used; the message names its key.
    """
    task = None if of_file is None else of_file.task
    optimizer: OptimizerConfig = instantiate(
        cfg.optimizer if of_file is None else of_file.optimizer
    )
    of_tables = optimizer.embedding if task is None else task.known_optimizer
    node = cfg.topology
    memory = TableMemory(node.memory_gib, node.memory_fraction, node.reserved_gib)
    machines = with_prices([machine_of(name, memory) for name in _hardware(cfg)], cfg.prices)
    sizes = _sizes(cfg.ranks)
    if len(sizes) == 1:
        refuse_unused({"least_gain": "ranks= has one number, and a gain is of more ranks"})
    nodes = _sharders(cfg, is_only_question=len(machines) == len(sizes) == 1, machines=machines)
    _check_caching(cfg, nodes)
    batch_size_of = _batch_sizes(cfg, sizes, task)
    dataset_of = functools.cache(functools.partial(_dataset, cfg))
    num_dense, samples = cfg.num_dense, cfg.samples
    if task is None:
        dataset = dataset_of(batch_size_of(sizes[0]))
        num_dense = dataset.num_dense
        samples = samples or _epoch(dataset)
    stated = _stated(cfg, optimizer, task)

    def case_of(machine: Machine, num_ranks: int, sharder: str) -> Case:
        batch_size = batch_size_of(num_ranks)
        found: ShardingTask | Refusal
        try:
            topology = machine.topology(num_ranks, stated)
            tables = dataset_of(batch_size).tables if task is None else task.tables
            found = ShardingTask(tables, topology, batch_size, of_tables)
        except ConfigError as error:
            found = Refusal(str(error))
        return Case(machine, num_ranks, sharder, batch_size, found)

    question = Question(
        cases=list(itertools.starmap(case_of, itertools.product(machines, sizes, nodes))),
        context_of=functools.partial(_context, cfg, nodes, folder),
        planner_of=functools.partial(_planner, cfg, nodes),
        dense=build_dense(cfg, num_dense, optimizer),
        seed=cfg.seed,
    )
    return question, samples


def _context(
    cfg: DictConfig,
    nodes: dict[str, DictConfig],
    folder: Path | None,
    case: Case,
    task: ShardingTask,
) -> RunContext:
    """Return the hardware of a case; this machine is measured first if a sharder needs it."""
    if case.machine.is_gpu:
        return run_context(case.machine.name, task, task.optimizer)

    def build(context: RunContext) -> list[Planner]:
        cases = (dataclasses.replace(case, sharder=name) for name in nodes)
        return [_planner(cfg, nodes, of_sharder, context, MOST_BOX_S) for of_sharder in cases]

    context = run_context(HERE, task, task.optimizer)
    if folder is None:
        return context
    return measured_here(cfg, context, task, build, folder=folder)[0]


def same_in_run(of_file: AskedTask | None) -> list[str]:
    """Return the overrides that runs of all candidates need: of the file and the command line."""
    stated = [
        override.input_line
        for override in command_line()
        if override.key_or_group.split(".")[0] in KEYS_OF_RUN
        or override.key_or_group.startswith(("sharder.", *KEYS_OF_RUN_TOPOLOGY))
    ]
    return [*(() if of_file is None else of_file.overrides), *stated]


def _hardware(cfg: DictConfig) -> list[str]:
    names = checked_names("hardware", _as_list(cfg.hardware), example="[h100,a100]")
    if HERE in names and device_type() == "cuda":
        raise ConfigError("hardware is here, which has GPUs; name their kind, or cpu")
    return names


def _as_list(value: Any) -> list[Any]:
    """Return a list of a config, or a single value as one."""
    return value if isinstance(value := plain(value), list) else [value]


def _sizes(value: Any) -> list[int]:
    sizes = _as_list(value)
    if not sizes:
        raise ConfigError("ranks is an empty list, must have numbers of ranks: [8,16,32]")
    for size in sizes:
        check_count("ranks", size, least=1, most=MAX_RANKS)
    if len(set(sizes)) < len(sizes):
        raise ConfigError(f"ranks has {max(sizes, key=sizes.count)} twice")
    return sorted(sizes)


def _batch_sizes(
    cfg: DictConfig, sizes: Sequence[int], task: ShardingTask | None
) -> Callable[[int], int]:
    """Return the function from a number of ranks to the global batch size."""
    if cfg.batch_per_rank is not None:
        if cfg.batch_size is not None:
            raise ConfigError("set batch_size or batch_per_rank, not both")
        per_rank = cfg.batch_per_rank
        check_count("batch_per_rank", per_rank, least=1, most=MAX_BATCH_SIZE // max(sizes))
        return lambda num_ranks: per_rank * num_ranks
    batch_size = cfg.batch_size
    if batch_size is None:
        batch_size = DEFAULT_BATCH_SIZE if task is None else task.batch_size
    for size in sizes:
        check_batch_size(batch_size, size)
    return lambda num_ranks: batch_size


def _dataset(cfg: DictConfig, batch_size: int) -> Dataset:
    of_size = cfg.copy()
    of_size.batch_size = batch_size
    return build_dataset(of_size)


def _epoch(dataset: Dataset) -> float | None:
    """Return the samples of an epoch; None of synthetic data, and of statistics without data."""
    if isinstance(dataset, SyntheticDataset):
        return None
    return float(dataset.num_batches("train") * dataset.batch_size) or None


def _stated(cfg: DictConfig, optimizer: OptimizerConfig, task: ShardingTask | None) -> Topology:
    """Return what the user says of all ranks; the machines know the rest."""
    node = cfg.topology.copy()
    node.world_size = 1 if node.ranks_per_host is None else node.ranks_per_host
    node.memory_gib, node.reserved_gib = 1.0, 0.0
    memory = memory_of(optimizer.embedding)
    if task is not None:
        memory = (task.topology.bytes_per_element, task.topology.optimizer_bytes_per_row)
    return stated_topology(node, memory)


def _check_caching(cfg: DictConfig, nodes: Mapping[str, DictConfig]) -> None:
    """Refuse host memory that no sharder uses, and its use on hosts whose memory is not stated."""
    asking = [name for name, node in nodes.items() if node.get("cache_tables") == "auto"]
    stated = cfg.topology.host_memory_gib
    if asking and stated is None:
        raise ConfigError(
            "sharder.cache_tables is auto, which needs host memory; state that of a rank for "
            "tables: topology.host_memory_gib"
        )
    if stated is not None and not asking:
        raise ConfigError(
            f"topology.host_memory_gib is {stated}, and no sharder uses it; ask for tables in host "
            "memory with sharder=neuroshard sharder.cache_tables=auto"
        )


def _sharders(
    cfg: DictConfig, *, is_only_question: bool, machines: Sequence[Machine]
) -> dict[str, DictConfig]:
    """Return the nodes of the sharders to compare by their names."""
    named = _named_sharders()
    if isinstance(named, str):
        return {named: cfg.sharder}
    if named is None:
        named = [DEFAULT_SHARDER]
        if is_only_question:
            named = [name for name in _all_sharders() if _applies(name, machines[0])]
    elif any(override.key_or_group.startswith("sharder.") for override in command_line()):
        raise ConfigError("sharder.* needs one sharder; sharder= names several")
    return {name: _sharder_node(cfg, name) for name in named}


def _named_sharders() -> str | list[str] | None:
    """Return what the command line says of the sharder; None for nothing."""
    named = [o.value() for o in command_line() if o.key_or_group == "sharder"]
    if not named or not isinstance(named[-1], list):
        return named[-1] if named else None
    if not named[-1]:
        raise ConfigError("sharder is an empty list; name sharders: [neuroshard,dim]")
    return checked_names("sharder", named[-1], example="[neuroshard,dim]")


def _all_sharders() -> list[str]:
    names = options_of("sharder")
    return [name for name in names if name not in NOT_COMPARED]


def _applies(name: str, machine: Machine) -> bool:
    """Return whether a sharder needs no policy, or one that was trained for the machine."""
    device = "cuda" if machine.is_gpu else "cpu"
    return name not in POLICIES or has_artifact(policy_kind(POLICIES[name]), device, CALIBRATED)


def _sharder_node(cfg: DictConfig, name: str) -> DictConfig:
    node = option_node("sharder", name)
    node._set_parent(cfg)  # for values such as ${seed}
    return node


def _planner(
    cfg: DictConfig,
    nodes: dict[str, DictConfig],
    case: Case,
    context: RunContext,
    box_s: float,
) -> Planner:
    """Build the planner of a case, whose sharder ends within its time."""
    of_case = cfg.copy()
    sharder = nodes[case.sharder].copy()
    with open_dict(of_case), open_dict(sharder):
        if sharder.get("time_budget_s") is not None:
            sharder.time_budget_s = min(sharder.time_budget_s, SEARCH_SHARE * box_s)
        if "timeout_s" in sharder:
            sharder.timeout_s = min(sharder.timeout_s, max(1, int(TIMEOUT_SHARE * box_s)))
        of_case.sharder = sharder
        if case.machine.is_gpu:
            of_case.cost_model = GPU_PRICES
    try:
        planner = build_planner(of_case, context)
    except Exception as error:
        # the other cases go on, so an error in Hydra's wrapper becomes the reason of this one
        if (message := readable_message(error)) is None:
            raise
        raise ConfigError(message) from error
    return dataclasses.replace(planner, value_profiles=None)
