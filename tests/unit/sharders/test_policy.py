"""The sharder of policies finds a plan where there is one, whatever a policy prefers."""

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrm_sharded import ShardingTask, validate
from dlrm_sharded.datasets.feasibility_tasks import feasibility_tasks
from dlrm_sharded.files.errors import DataError, InfeasibleTaskError
from dlrm_sharded.plans.plan import Shard, ShardingPlan
from dlrm_sharded.rl.base import Policy
from dlrm_sharded.sharders.base import SharderContext, sharder_name
from dlrm_sharded.sharders.heuristics import GreedySharder
from dlrm_sharded.sharders.policy import PolicySharder, policy_sharder
from tests.unit.rl.cases import cost_model
from tests.unit.synthetic import packed_tasks, tables_of, task_of, with_memory

Ranks = tuple[int, ...] | None


class Deciding:
    """A policy of the placement that a function chooses; it keeps what it was asked."""

    def __init__(self, choose: Callable[[ShardingTask, int, int], Ranks]) -> None:
        self._choose = choose
        self.asked: list[tuple[ShardingTask, int, int]] = []

    def place(self, task: ShardingTask, *, num_samples: int, seed: int) -> Ranks:
        self.asked.append((task, num_samples, seed))
        return self._choose(task, num_samples, seed)


def repairing(task: ShardingTask, num_samples: int, seed: int) -> Ranks:
    """Balance lookups, and place large tables first where it must be."""
    try:
        shards = GreedySharder("lookup", seed=seed).shard(task).shards_by_table()
    except InfeasibleTaskError:
        return None
    return tuple(shards[table.name][0].rank for table in task.tables)


def careless(task: ShardingTask, num_samples: int, seed: int) -> Ranks:
    """Take any rank with enough memory, table by table; a few times."""
    rng = random.Random(seed)
    for _ in range(1 + num_samples):
        free, ranks = list(task.topology.rank_memory_bytes), []
        for table in task.tables:
            size = task.topology.table_bytes(table)
            fitting = [rank for rank, left in enumerate(free) if left >= size]
            if not fitting:
                break
            ranks.append(rng.choice(fitting))
            free[ranks[-1]] -= size
        else:
            return tuple(ranks)
    return None


def lost() -> Deciding:
    """A policy that fits no task."""
    return Deciding(lambda *_: None)


POLICIES = {"repairing": Deciding(repairing), "careless": Deciding(careless)}
each_policy = pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)


def sharder(policy: Policy, *, split: bool = True) -> PolicySharder:
    return PolicySharder(policy, name="test", num_samples=4, split=split, seed=1)


@each_policy
def test_plans_all_that_is_feasible(policy: Policy) -> None:
    assert sharder_name(sharder(policy)) == "test"
    for each in feasibility_tasks(num=30):
        if each.witness is None:
            with pytest.raises(InfeasibleTaskError, match="no plan can fit: the tables need"):
                sharder(policy).shard(each.task)
        else:
            validate(sharder(policy).shard(each.task), each.task)


@each_policy
@given(task=packed_tasks(st.floats(0.8, 2.0), rows=st.integers(1, 20) | st.integers(1000, 5000)))
def test_valid_plan_or_clear_error(policy: Policy, task: ShardingTask) -> None:
    try:
        plan = sharder(policy).shard(task)
    except InfeasibleTaskError as error:
        topology = task.topology
        fits = task.table_bytes <= sum(topology.rank_memory_bytes)
        assert ("does not prove" in str(error)) == fits
        if policy is POLICIES["repairing"]:
            with pytest.raises(InfeasibleTaskError):
                GreedySharder("lookup", seed=1).shard(task)
    else:
        validate(plan, task)


@each_policy
@given(
    shapes=st.lists(st.tuples(st.integers(2000, 9000), st.integers(1, 32)), min_size=1, max_size=8),
    world_size=st.integers(1, 6),
)
def test_equal_ranks_can_be_filled(
    policy: Policy, shapes: list[tuple[int, int]], world_size: int
) -> None:
    """To 95 %, whatever the tables."""
    tables = tables_of(*((rows, 4 * n, 1.0) for rows, n in shapes))
    size = sum(4 * table.num_embeddings * table.embedding_dim for table in tables)
    task = task_of(tables, world_size, int(size / world_size / 0.95) + 1, 64)
    validate(sharder(policy).shard(task), task)


def cost_ms(plan: ShardingPlan, task: ShardingTask) -> float:
    """Predict the cost under the packaged model."""
    return cost_model().predict(plan, task).cost_ms


def tables_on(shapes: Sequence[tuple[int, int]], *memory_bytes: int) -> ShardingTask:
    """On ranks with so much memory each."""
    tables = tables_of(*((rows, cols, 1.0) for rows, cols in shapes))
    return with_memory(task_of(tables, len(memory_bytes), batch_size=64), *memory_bytes)


@pytest.mark.parametrize("split", [True, False])
def test_splits_only_what_does_not_fit(split: bool) -> None:
    """Tables that fit stay whole, and are placed as the policy says."""
    task = tables_on([(1000, 8), (1000, 16), (10, 4)], 10**6, 10**6)
    plan = sharder(POLICIES["repairing"], split=split).shard(task)
    ranks = repairing(task, 0, 1)
    assert plan.shards == tuple(map(Shard.whole, task.tables, ranks))


def test_a_table_that_fits_no_rank() -> None:
    task = tables_on([(1000, 64), (10, 4)], 150_000, 150_000)
    of_table = sharder(POLICIES["repairing"]).shard(task).shards_by_table()
    assert len(of_table["t0"]) == 2
    assert len(of_table["t1"]) == 1
    message = r"'t0' needs 256,000 B, more than the 150,000 B of any rank"
    with pytest.raises(InfeasibleTaskError, match=message):
        sharder(POLICIES["repairing"], split=False).shard(task)


def test_rows_of_every_table() -> None:
    """Then there is nothing left to place."""
    task = tables_on([(10_000, 4), (10_000, 4)], 160_000, 160_000)
    plan = sharder(lost()).shard(task)
    validate(plan, task)
    assert len(plan.shards) == 4


@pytest.mark.parametrize("split", [True, False])
def test_finds_nothing(split: bool) -> None:
    """Not in ever smaller pieces, and there is no memory for row blocks."""
    policy = lost()
    task = tables_on([(1000, 64), (1000, 128), (1000, 4)], 10**6, 1000)
    with pytest.raises(InfeasibleTaskError) as error:
        sharder(policy, split=split).shard(task)
    tables = "tables, split ever finer" if split else "whole tables"
    assert f"sharder=test could not fit 3 {tables}, of 784,000 B" in str(error.value)
    assert "with 1,001,000 B in all; this does not prove that no plan fits" in str(error.value)
    assert ("sharder.split=true" in str(error.value)) is not split
    num_pieces = [len(asked.tables) for asked, _, _ in policy.asked]
    assert num_pieces[0] == 3
    assert len(num_pieces) == 1 or max(num_pieces) > 20
    assert (len(num_pieces) > 1) is split


def test_what_a_policy_is_asked() -> None:
    """Tables with a profile, the samples and the seed."""
    policy = lost()
    with pytest.raises(InfeasibleTaskError):
        sharder(policy, split=False).shard(tables_on([(1000, 64), (1000, 128)], 10**6, 10**6))
    [(asked, num_samples, seed)] = policy.asked
    assert (num_samples, seed) == (4, 1)
    assert asked.batch_size == 64
    assert [table.embedding_dim for table in asked.tables] == [64, 128]
    assert all(table.reuse_histogram is not None for table in asked.tables)


@pytest.mark.parametrize("method", ["dreamshard", "autoshard"])
def test_an_artifact_that_is_not_there(method: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"cannot read the policy .*No such file") as error:
        policy_sharder(SharderContext(), method=method, artifact=str(tmp_path / "mine.json"))
    assert f"dlrm-train-policy policy={method}" in str(error.value)
