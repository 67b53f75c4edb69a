"""Conformance checks for sharders, datasets and cost models, ours and yours, and small tasks.

from dlrm_sharded.testing import check_cost_model, check_dataset, check_sharder, small_tasks

@pytest.mark.parametrize("task", small_tasks().values(), ids=small_tasks())
def test_my_sharder(task):
    check_sharder(lambda: MySharder(), task)

def test_my_dataset():
    check_dataset(lambda: MyDataset("my_file", batch_size=12))
"""

from __future__ import annotations

import copy
import dataclasses
import random
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torchrec.datasets.utils import Batch

from dlrm_sharded.cost.base import CostedTask, CostModel, cost_task, with_assumed_profiles
from dlrm_sharded.cost.bound import lower_bound_ms
from dlrm_sharded.cost.communication import STEP_EXCHANGES
from dlrm_sharded.cost.compute import READ_MB
from dlrm_sharded.cost.workload import workload_of_plan
from dlrm_sharded.datasets.base import SPLITS, Dataset, check_batch, check_lengths, ids_per_sample
from dlrm_sharded.files.errors import ShardingError
from dlrm_sharded.plans.layouts import Replicas, RowBlocks, layout_name, trained_layouts
from dlrm_sharded.plans.plan import Shard, ShardingPlan
from dlrm_sharded.plans.plan_cost import STAGES, PlanCost
from dlrm_sharded.plans.tables import COLUMN_MULTIPLE, Table
from dlrm_sharded.plans.task import (
    ShardingTask,
    Topology,
    in_half,
    with_optimizer,
    without_memory_limit,
)
from dlrm_sharded.plans.validation import validate
from dlrm_sharded.sharders.base import Sharder, sharder_name

NUM_RANDOM_PLANS = 20
SHARE_OF_REPLICAS = 0.15
TOLERANCE = 1e-9
"""Relative tolerance for sums of the same numbers in different orders."""


def check_sharder(make: Callable[[], Sharder], task: ShardingTask) -> ShardingPlan | None:
    """Assert the properties of a sharder that the trainer relies on.

    The sharder returns a valid plan or raises a `ShardingError` with a message, a second sharder
    does the same, and the task and the global random states remain unchanged. Under an optimizer
    that cannot train replicas, the plan has none.

    Args:
        make: builds the sharder; called several times.

    Returns:
        The plan; None if there was an error.
    """
    task_before = copy.deepcopy(task)
    states_before = _random_states()
    assert sharder_name(make()), "the sharder has no name"
    outcomes = [_outcome(make(), task), _outcome(make(), task)]
    assert task == task_before, "the sharder changed the task"
    assert _random_states() == states_before, "the sharder used a global random state"
    assert outcomes[0] == outcomes[1], "the sharder is not deterministic"
    if isinstance(plan := outcomes[0], str):
        return None
    assert isinstance(plan, ShardingPlan), f"the sharder returned {plan!r}, which is no plan"
    validate(plan, task)
    _check_layouts(plan, task)
    assert ShardingPlan.from_json(plan.to_json()) == plan, "the plan changes through JSON"
    if plan.replicated_tables:
        _check_without_replicas(make(), task)
    return plan


def _check_without_replicas(sharder: Sharder, task: ShardingTask) -> None:
    """Assert that a sharder makes no replicas under Adam, which trains none."""
    on_gpus = dataclasses.replace(task.topology, compute_device="cuda")
    under_adam = with_optimizer(dataclasses.replace(task, topology=on_gpus), "adam")
    plan = _outcome(sharder, without_memory_limit(under_adam))
    assert isinstance(plan, str) or not plan.replicated_tables, (
        f"the sharder replicates {plan.replicated_tables} although the task's optimizer is adam, "
        "under which no table can be replicated: see task.can_replicate"
    )


def _check_layouts(plan: ShardingPlan, task: ShardingTask) -> None:
    """Assert that tables have permitted layouts, and keep fp16 unless they are replicated."""
    shards = plan.shards_by_table()
    for table in task.tables:
        layout = layout_name(shards[table.name], table, task.topology)
        trained = trained_layouts(table, task.topology)
        assert layout is None or layout in trained, f"{table.name} lies in {layout}"
        if table.precision != "fp32" and layout != "replicas":
            assert shards[table.name][0].precision == table.precision, f"{table.name} is in fp32"


def check_cost_model(model: CostModel, task: ShardingTask) -> None:
    """Assert the properties of a cost model that runs, the search and the lower bound rely on.

    The last two need an additive model and rely on the assumptions A1 to A4 of
    docs/notes/lower_bound.md. These are checked on random plans of the task, whose memory limits
    are ignored, with a relative tolerance of 1e-9.
    """
    task = with_assumed_profiles(model, without_memory_limit(task))
    rng = random.Random(0)
    plans = [_random_plan(task, rng) for _ in range(NUM_RANDOM_PLANS)]
    costs = [model.predict(plan, task) for plan in plans]
    costed = cost_task(model, task)
    for plan, cost in zip(plans, costs, strict=True):
        times = np.array([[rank.stage_ms(stage) for stage in STAGES] for rank in cost.per_rank])
        assert times.shape == (plan.world_size, len(STAGES)), "not every rank has a cost"
        assert np.isfinite(times).all(), "a time is not finite"
        assert model.predict(plan, task) == cost, "the cost model is not deterministic"
        if costed is not None:
            assert (times >= 0).all(), "a time is negative"
            _check_computation(costed, plan, cost)
    if costed is not None:
        _check_exchanges(costed)
        lowest_ms = min(cost.cost_ms for cost in costs)
        assert lower_bound_ms(costed) <= lowest_ms * (1 + TOLERANCE), "a plan beats the bound"


def check_dataset(make: Callable[[], Dataset], *, world_sizes: Sequence[int] = (1, 2, 3)) -> None:
    """Assert the properties of a dataset that the trainer relies on.

    - All tables have distinct names and an access profile.
    - There is a batch for training.
    - Batches have the promised shapes and types, and ids that exist in the tables.
    - A batch is the same whenever, and by whichever copy of the dataset, it is built.
    - The shares of all ranks make up the global batch for every world size.
    - The global random states remain unchanged.

    Args:
        make: builds the dataset; called several times, because every rank builds its own.
        world_sizes: numbers of ranks to check; those that do not divide the batch size are skipped.
    """
    states_before = _random_states()
    dataset, other = make(), make()
    for name in ("tables", "num_dense", "batch_size", "num_batches", "batch"):
        assert hasattr(dataset, name), f"the dataset has no `{name}`"
    assert dataset.num_batches("train") > 0, "there is no batch for training"
    _check_tables(dataset, other)
    for split in SPLITS:
        num_batches = dataset.num_batches(split)
        assert num_batches == other.num_batches(split) >= 0
        for index in {0, num_batches // 2, num_batches - 1} if num_batches else ():
            whole = dataset.batch(split, index, rank=0, world_size=1)
            _check_shapes(whole, dataset, world_size=1)
            check_batch(whole, dataset.tables)
            check_lengths(whole, ids_per_sample(dataset))
            again = _samples([make().batch(split, index, rank=0, world_size=1)])
            assert _samples([whole]) == again, f"{split} batch {index} is not repeatable"
            for world_size in world_sizes:
                if dataset.batch_size % world_size:
                    continue
                shares = [
                    other.batch(split, index, rank=rank, world_size=world_size)
                    for rank in reversed(range(world_size))
                ]
                for share in shares:
                    _check_shapes(share, dataset, world_size=world_size)
                assert _samples(shares[::-1]) == _samples([whole]), (
                    f"the shares of {world_size} ranks are not {split} batch {index}"
                )
    assert _random_states() == states_before, "the dataset used a global random state"


def _check_tables(dataset: Dataset, other: Dataset) -> None:
    tables = dataset.tables
    names = [table.name for table in tables]
    assert names, "there are no tables"
    assert len(set(names)) == len(names), f"two tables have the same name: {names}"
    assert tables == dataset.tables == other.tables, "the tables are not the same every time"
    batch = dataset.batch("train", 0, rank=0, world_size=1)
    check_batch(batch, tables)
    for table in tables:
        histogram = table.reuse_histogram
        assert histogram is not None, f"table {table.name!r} has no reuse histogram"
        if any(batch.sparse_features[name].values().numel() for name in table.feature_names):
            assert table.pooling_factor > 0, f"table {table.name!r} has ids, but pooling factor 0"
            assert abs(sum(histogram) - 1) < 1e-3, f"reuse shares of {table.name!r} do not sum to 1"


def _check_shapes(batch: Batch, dataset: Dataset, *, world_size: int) -> None:
    num_samples = dataset.batch_size // world_size
    dense, labels, sparse = batch.dense_features, batch.labels, batch.sparse_features
    assert dense.shape == (num_samples, dataset.num_dense), f"dense features are {dense.shape}"
    assert labels.shape == (num_samples,), f"labels are {labels.shape}"
    assert dense.dtype == labels.dtype == torch.float32, f"{dense.dtype}, {labels.dtype}"
    assert sparse.stride() == num_samples, f"sparse features have {sparse.stride()} samples"
    first_keys = dataset.batch("train", 0, rank=0, world_size=world_size).sparse_features.keys()
    assert sparse.keys() == first_keys, "the order of the sparse features changes"


def _samples(shares: list[Batch]) -> list[object]:
    """Return dense features, labels, and for each feature the lengths and ids of all samples."""
    features = [share.sparse_features.to_dict() for share in shares]
    columns = [
        [share.dense_features for share in shares],
        [share.labels for share in shares],
        *([jagged[key].lengths() for jagged in features] for key in features[0]),
        *([jagged[key].values() for jagged in features] for key in features[0]),
    ]
    return [torch.cat(column).tolist() for column in columns]


def small_tasks() -> dict[str, ShardingTask]:
    """Return tasks by name with shapes on which sharders fail: few, many, huge and odd tables."""

    def task(
        world_size: int,
        shapes: list[tuple[int, int, float]],
        memory: int,
        memory_bytes_by_rank: tuple[int, ...] | None = None,
    ) -> ShardingTask:
        tables = tuple(Table(f"t{i}", *shape) for i, shape in enumerate(shapes))
        ranks = Topology(world_size, memory, memory_bytes_by_rank=memory_bytes_by_rank)
        on_cpus = dataclasses.replace(ranks, compute_device="cpu")
        return ShardingTask(tables, on_cpus, batch_size=64 * world_size)

    mixed = [(1000, 16, 3.0), (50, 128, 1.0), (3, 4, 0.0), (20_000, 8, 20.5), (700, 768, 2.0)]
    return {
        "w1-one_table": task(1, [(100, 16, 1.0)], 10**6),
        "w2-mixed": in_half(task(2, mixed, 10**7)),
        "w3-mixed": task(3, mixed, 10**7),
        "w8-fewer_tables_than_ranks": task(8, mixed[:3], 10**7),
        "w2-huge_table": task(2, [*mixed, (10**6, 64, 1.0)], 10**7),
        "w3-tight": task(3, [(100, 4, float(i)) for i in range(9)], 4800),
        "w3-one_too_many": task(3, [(100, 4, 1.0)] * 10, 4800),
        "w2-repair": task(2, [(100, 4, 9.0), (100, 4, 8.0), (300, 4, 1.0)], 4800),
        "w3-different_memory": task(
            3, [(2000, 4, 1.0), *[(100, 4, float(i)) for i in range(6)]], 3200, (3200, 40_000, 4800)
        ),
        "w2-odd_names": ShardingTask(
            tables=tuple(Table(name, 64, 32, 2.0) for name in ("a.weight", "ä b", "t0", "0")),
            topology=Topology(2, 10**6, compute_device="cpu"),
            batch_size=128,
        ),
        "w3-one_narrow_table": task(3, [(100, 4, 1.0)], 10**6),
        "w8-equal": task(8, [(64, 32, 4.0)] * 24, 10**6),
        "w4-sequences": ShardingTask(
            tables=tuple(
                Table(f"t{i}", 64 * 4**i, 32, (3.0, 50.0)[i % 2], pooled=i == 3, module="ab"[i % 2])
                for i in range(5)
            ),
            topology=Topology(4, 3 * 10**6, 2, compute_device="cpu"),
            batch_size=256,
        ),
        "w2-adam": with_optimizer(
            ShardingTask(
                tuple(Table(f"t{i}", 50 * 4**i, 64, 2.0) for i in range(5)),
                Topology(2, 10**8),
                4096,
            ),
            "adam",
        ),
    }


def _check_computation(costed: CostedTask, plan: ShardingPlan, cost: PlanCost) -> None:
    """Assert the assumptions A1 and A2 for the lookups of a plan."""
    workload, compute = workload_of_plan(plan, costed.task), costed.compute
    vectors = compute.vectors(workload)
    sums_ms = compute.times_ms(workload.by_rank(vectors), workload.num_lookups())
    predicted_ms = [[rank.fwd_compute_ms, rank.bwd_compute_ms] for rank in cost.per_rank]
    np.testing.assert_allclose(
        predicted_ms, sums_ms, rtol=TOLERANCE, err_msg="computation is not of sums of vectors"
    )
    empty = sorted(set(range(plan.world_size)) - set(workload.rank.tolist()))
    assert not sums_ms[empty].any(), "a rank without shards computes"
    alone_ms = compute.work_ms(vectors, vectors)
    crowd = vectors + vectors.sum(axis=0)
    crowd[:, READ_MB] += 1.0
    crowded_ms = compute.work_ms(vectors, crowd)
    assert (crowded_ms >= alone_ms * (1 - TOLERANCE)).all(), "a crowded rank computes faster"


def _check_exchanges(costed: CostedTask) -> None:
    """Assert the assumptions A3 and A4 for all-to-alls of random volumes."""
    communication, hosts = costed.communication, costed.hosts
    weights = (communication.exchange, communication.reduce, communication.all_reduce_weights)
    assert all((weight >= 0).all() for weight in weights), "an exchange has a negative cost"
    rng = np.random.default_rng(0)
    one, other = 1e6 * rng.dirichlet(np.full(hosts.world_size, 0.3), (2, NUM_RANDOM_PLANS))
    for kind in STEP_EXCHANGES:
        one_ms, other_ms, reverse_ms, middle_ms = (
            communication.all_to_all_ms(kind, volume, np.ones_like(volume), hosts)
            for volume in (one, other, one[:, ::-1], (one + other) / 2)
        )
        assert (middle_ms <= (one_ms + other_ms) / 2 * (1 + TOLERANCE)).all(), "not convex"
        # the reverse order renumbers hosts, and ranks within them, and keeps hosts together
        np.testing.assert_allclose(
            reverse_ms[:, ::-1], one_ms, rtol=TOLERANCE, err_msg="ranks have numbers"
        )


def _random_plan(task: ShardingTask, rng: random.Random) -> ShardingPlan:
    """Return a random plan with whole tables, and with layouts that the tables may have."""
    topology = task.topology
    shards: list[Shard] = []
    for table in task.tables:
        whole = Shard.whole(table, rng.randrange(topology.world_size))
        other = rng.randrange(topology.world_size)
        size = rng.choice([1, *topology.group_sizes])
        blocks = RowBlocks(range(other - other % size, other - other % size + size))
        trained = trained_layouts(table, topology)
        may_be_replicated = task.can_replicate and "replicas" in trained
        rows = "rows" if size == topology.world_size else "host_rows"
        if topology.world_size > 1 and may_be_replicated and rng.random() < SHARE_OF_REPLICAS:
            shards += Replicas(topology.world_size).shards(table)
        elif size > 1 and rows in trained and blocks.is_possible(table):
            shards += blocks.shards(table)
        elif "columns" in trained and table.embedding_dim > COLUMN_MULTIPLE and other != whole.rank:
            edge = rng.randrange(COLUMN_MULTIPLE, table.embedding_dim, COLUMN_MULTIPLE)
            shards.append(dataclasses.replace(whole, cols=(0, edge)))
            shards.append(dataclasses.replace(whole, rank=other, cols=(edge, table.embedding_dim)))
        else:
            shards.append(whole)
    return ShardingPlan(topology.world_size, tuple(shards))


def _outcome(sharder: Sharder, task: ShardingTask) -> ShardingPlan | str:
    """Return the plan, or the message of the error."""
    try:
        return sharder.shard(task)
    except ShardingError as error:
        assert str(error), f"{type(error).__name__} has no message"
        return str(error)


def _random_states() -> tuple[object, ...]:
    numpy_state = tuple(np.asarray(part).tobytes() for part in np.random.get_state(legacy=True))
    return random.getstate(), numpy_state, torch.random.get_rng_state().numpy().tobytes()
