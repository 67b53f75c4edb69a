"""Every sharder in conf/sharder keeps the contract; a new yaml is tested as soon as it is there."""

import functools
import itertools
import operator
import random
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig

from dlrm_sharded import RunContext, Sharder, ShardingPlan, Table, validate
from dlrm_sharded.commands.sharders import planner_factory
from dlrm_sharded.commands.yamls import CONF_DIR, options_of
from dlrm_sharded.files.errors import InfeasibleTaskError, InvalidPlanError, ShardingError
from dlrm_sharded.files.json_files import write_json
from dlrm_sharded.plans.layouts import Replicas, RowBlocks
from dlrm_sharded.plans.task import ShardingTask, with_optimizer
from dlrm_sharded.sharders.heuristics import GreedySharder
from dlrm_sharded.sharders.planning import Planner
from dlrm_sharded.testing import check_sharder, small_tasks
from tests.unit.synthetic import tables_of, task_of, with_topology

FULL = "torchrec;full=true"
SHARDERS = [*options_of("sharder"), FULL]
"""Names of yamls, and perhaps a setting, as `dlrm-compare` has them."""

SLOW = pytest.mark.slow  # TorchRec's dynamic programming and very wide tables take half of the time
TASKS = small_tasks()
MISS_PLANS = ("neuroshard",)
"""It keeps a published fault; all others find what is there."""

REPLICATE = ("search", FULL)
"""Sharders that replicate tables where the optimizer of these allows it."""

POLICIES = ("autoshard", "dreamshard")
SPLIT_FREELY = (*REPLICATE, *POLICIES, "torchrec")
"""Sharders that split tables into any number of shards."""

USE_COSTS = {"search", "neuroshard"}
"""Sharders whose plans depend on the run's cost model."""

NO_CLOCK = {"search": ("sharder.time_budget_s=null", "sharder.patience=1")}
"""Plans of a search that the clock ends depend on the speed of the machine."""

SHORT = {"search": ("sharder.time_budget_s=0.5",)}


@functools.cache
def config(name: str, overrides: tuple[str, ...]) -> DictConfig:
    chosen, *settings = name.split(";")
    words = [f"sharder={chosen}", *(f"sharder.{setting}" for setting in settings)]
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF_DIR)):
        return compose("plan", ["task=unused", *words, *NO_CLOCK.get(name, ()), *overrides])


def build(name: str, overrides: tuple[str, ...]) -> Sharder:
    return planner_factory(config(name, overrides)).planner(RunContext()).sharder


def overrides_of(name: str, task: ShardingTask, folder: Path) -> tuple[str, ...]:
    """Return the file of a plan for `plan_file`, of no tables where there is none for the task."""
    if name != "plan_file":
        return ()
    try:
        plan = GreedySharder("size").shard(task)
    except ShardingError:
        plan = ShardingPlan(task.topology.world_size, ())
    write_json(folder / "plan.json", plan.to_json())
    return (f"sharder.path={folder / 'plan.json'}",)


def packable(task: ShardingTask) -> bool:
    """Whether a table-wise plan fits the memory; tries all placements of a few tables."""
    sizes = [task.topology.table_bytes(table) for table in task.tables]
    for ranks in itertools.product(range(task.topology.world_size), repeat=len(sizes)):
        used = [0] * task.topology.world_size
        for size, rank in zip(sizes, ranks, strict=True):
            used[rank] += size
        if all(map(operator.le, used, task.topology.rank_memory_bytes)):
            return True
    return False


@pytest.mark.parametrize("task_name", TASKS)
@pytest.mark.parametrize("name", [*options_of("sharder"), pytest.param(FULL, marks=SLOW)])
def test_contract(name: str, task_name: str, tmp_path: Path) -> None:
    task = TASKS[task_name]
    overrides = overrides_of(name, task, tmp_path)

    plan = check_sharder(lambda: build(name, overrides), task)

    if len(task.tables) <= 9 and task.topology.world_size <= 3 and name not in MISS_PLANS:
        assert (plan is not None) or not packable(task)


@pytest.mark.parametrize("layouts", [(), ("columns",), ("rows",), ("columns", "rows")], ids=str)
@pytest.mark.parametrize("name", sorted(set(SHARDERS) - {"plan_file"}))
def test_layouts_that_a_model_trains(name: str, layouts: tuple[str, ...]) -> None:
    """Busy and small tables, which sharders like to split or to replicate, in fp16 and fp32."""
    tables = tables_of(*((50 if i % 2 else 400_000, 64, (1.0, 90.0, 2.0)[i % 3]) for i in range(4)))
    task = task_of(tables, 4, 10**9, 4096, device="cuda", local_world_size=2).with_values(
        precision={f"t{i}": ("fp32", "fp16")[i // 2 % 2] for i in range(4)},
        layouts={f"t{i}": frozenset(layouts) for i in range(4)},
    )

    assert check_sharder(lambda: build(name, ()), task) is not None


@pytest.mark.parametrize("width", [2052, pytest.param(16_384, marks=SLOW)])
@pytest.mark.parametrize("name", sorted(set(SHARDERS) - {"plan_file"}))
def test_tables_too_wide_for_a_gpu(name: str, width: int) -> None:
    """Split by all that split freely, refused with the reason by the others, and left on a CPU."""
    tables = (Table("wide", 1000, width, 2.0), *tables_of(*[(500, 16, 1.0)] * 9))
    task = task_of(tables, 8, batch_size=512, device="cuda")
    on_cpu = with_topology(task, compute_device="cpu")

    plan = check_sharder(lambda: build(name, ()), task)

    assert (plan is not None) == (name in SPLIT_FREELY)
    if name not in SPLIT_FREELY:
        with pytest.raises(InfeasibleTaskError, match="2,048 columns"):
            build(name, ()).shard(task)
    if name != "neuroshard":
        assert check_sharder(lambda: build(name, ()), on_cpu) is not None


def random_task(seed: int) -> ShardingTask:
    """A task of a training with Adam, some of whose tables are worth replicating."""
    rng = random.Random(seed)
    shapes = [
        (int(10 ** rng.uniform(0.5, 4)), rng.choice([64, 128, 256]), rng.uniform(1.0, 20.0))
        for _ in range(rng.randint(4, 14))
    ]
    num_ranks = rng.choice([2, 3, 4, 8])
    adam = {"bytes_per_element": 12, "device": "cuda"}
    return task_of(tables_of(*shapes), num_ranks, batch_size=8192 * num_ranks, **adam)


ADAM_TASKS = {f"adam-{seed}": random_task(seed) for seed in range(4)}


@pytest.mark.parametrize("name", sorted(set(SHARDERS) - {"plan_file"}))
def test_no_replicas_under_adam(name: str) -> None:
    """Neither where the task names it, nor where it has only the memory of its state."""
    sharder, replicated = build(name, SHORT.get(name, ())), 0
    for unnamed in ADAM_TASKS.values():
        for task in (with_optimizer(unnamed, "sgd"), unnamed, with_optimizer(unnamed, "adam")):
            try:
                plan = sharder.shard(task)
            except InfeasibleTaskError:
                assert name in MISS_PLANS
                continue
            validate(plan, task)
            replicated += bool(plan.replicated_tables)
            assert not plan.replicated_tables or task.optimizer == "sgd"
    assert (replicated > 0) == (name in REPLICATE), "the tasks show something"


def test_a_sharder_that_replicates_whatever_the_optimizer_is_found() -> None:
    """As a sharder of the user's might."""

    class Everywhere:
        def shard(self, task: ShardingTask) -> ShardingPlan:
            ranks = task.topology.world_size
            shards = [shard for table in task.tables for shard in Replicas(ranks).shards(table)]
            return ShardingPlan(ranks, tuple(shards))

    with pytest.raises(AssertionError, match="although the task's optimizer is adam"):
        check_sharder(Everywhere, TASKS["w8-equal"])
    with pytest.raises(InvalidPlanError, match="no table can be replicated"):
        check_sharder(Everywhere, TASKS["w2-adam"])


def test_a_sharder_that_splits_what_has_to_stay_whole_is_found() -> None:
    """The model would not train its plan, which is valid for a task alone."""

    class InRows:
        def shard(self, task: ShardingTask) -> ShardingPlan:
            ranks = task.topology.world_size
            blocks = RowBlocks(range(ranks))
            return ShardingPlan(ranks, tuple(s for t in task.tables for s in blocks.shards(t)))

    task = task_of(tables_of((400, 64, 2.0)), device="cuda")
    assert check_sharder(InRows, task) is not None
    whole = task.with_values(layouts={"t0": frozenset({"columns"})})
    with pytest.raises(AssertionError, match="t0 lies in rows"):
        check_sharder(InRows, whole)


def test_finds_all_yamls() -> None:
    heuristics = {"random", "size", "dim", "lookup", "size_lookup"}
    assert {*SPLIT_FREELY, *heuristics, *MISS_PLANS, "plan_file"} <= set(SHARDERS)


@pytest.mark.parametrize("name", SHARDERS)
def test_sharders_that_use_the_costs_of_the_run(name, tmp_path):
    """Others would wait for a measurement that does not concern them."""
    overrides = overrides_of(name, TASKS["w3-mixed"], tmp_path)
    planner = planner_factory(config(name, overrides)).planner(RunContext())
    assert planner.uses_costs == (name in USE_COSTS)


def test_a_sharder_without_a_context_may_say_that_it_uses_costs():
    class UsesCosts(GreedySharder):
        uses_costs = True

    assert Planner(UsesCosts("size"), None).uses_costs
    assert not Planner(GreedySharder("size"), None).uses_costs
