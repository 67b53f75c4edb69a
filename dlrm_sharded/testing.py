"""For tests of sharders, ours and those of plug-ins: what any sharder must do, and small tasks.

from dlrm_sharded.testing import check_sharder, small_tasks

@pytest.mark.parametrize("task", small_tasks().values(), ids=small_tasks())
def test_my_sharder(task):
    check_sharder(lambda: MySharder(), task)
"""

from __future__ import annotations

import copy
import itertools
import operator
import random
from collections.abc import Callable

import numpy as np
import torch

from dlrm_sharded.errors import ShardingError
from dlrm_sharded.plan import ShardingPlan
from dlrm_sharded.sharders.base import Sharder, sharder_name
from dlrm_sharded.tables import Table
from dlrm_sharded.task import ShardingTask, Topology
from dlrm_sharded.validation import validate


def check_sharder(make: Callable[[], Sharder], task: ShardingTask) -> ShardingPlan | None:
    """Assert what the trainer relies on.

    A valid plan or a `ShardingError` with a message, the same again from a second sharder, the task
    and the global random states as before.

    Args:
        make: builds the sharder; called twice.

    Returns:
        The plan; None where there was an error.
    """
    task_before = copy.deepcopy(task)
    states_before = _random_states()
    outcomes = [_outcome(make(), task) for _ in range(2)]
    assert task == task_before, "the sharder changed the task"
    assert _random_states() == states_before, "the sharder used a global random state"
    assert outcomes[0] == outcomes[1], "the sharder is not deterministic"
    plan = make().shard(task) if isinstance(outcomes[0], tuple) else None
    if plan is not None:
        validate(plan, task)
        assert sharder_name(make()), "the sharder has no name"
        assert ShardingPlan.from_json(plan.to_json()) == plan, "the plan changes through JSON"
    return plan


def small_tasks() -> dict[str, ShardingTask]:
    """Tasks by name, with the shapes on which sharders fail: few, many, huge and odd tables."""

    def task(
        world_size: int,
        tables: list[tuple[int, int, float]],
        memory: int,
        by_rank: tuple[int, ...] | None = None,
    ) -> ShardingTask:
        return ShardingTask(
            tables=tuple(Table(f"t{i}", *shape) for i, shape in enumerate(tables)),
            topology=Topology(
                world_size, memory, compute_device="cpu", memory_bytes_by_rank=by_rank
            ),
            batch_size=64 * world_size,
        )

    mixed = [(1000, 16, 3.0), (50, 128, 1.0), (3, 4, 0.0), (20_000, 8, 20.5), (700, 768, 2.0)]
    return {
        "w1-one_table": task(1, [(100, 16, 1.0)], 10**6),
        "w2-mixed": task(2, mixed, 10**7),
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
        "w8-equal": task(8, [(64, 32, 4.0)] * 24, 10**6),
    }


def packable(task: ShardingTask) -> bool:
    """Whether some table-wise plan fits the memory: all placements tried, for a few tables only."""
    sizes = [task.topology.table_bytes(table) for table in task.tables]
    for ranks in itertools.product(range(task.topology.world_size), repeat=len(sizes)):
        used = [0] * task.topology.world_size
        for size, rank in zip(sizes, ranks, strict=True):
            used[rank] += size
        if all(map(operator.le, used, task.topology.rank_memory_bytes)):
            return True
    return False


def _outcome(sharder: Sharder, task: ShardingTask) -> object:
    """The shards of the plan, or the message of the error."""
    try:
        return sharder.shard(task).shards
    except ShardingError as error:
        assert str(error), f"{type(error).__name__} says nothing"
        return str(error)


def _random_states() -> tuple[object, ...]:
    numpy_state = np.random.get_state(legacy=True)
    return (
        random.getstate(),
        tuple(np.asarray(part).tobytes() for part in numpy_state),
        torch.random.get_rng_state().numpy().tobytes(),
    )
