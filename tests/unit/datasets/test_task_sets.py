"""Task sets, and the kinds of their tables, are what they say, whatever the seed."""

import pytest

from dlrm_sharded.datasets.feasibility_tasks import feasibility_tasks
from dlrm_sharded.datasets.paper_tables import (
    autoshard_synthetic,
    dreamshard_table_1,
    neuroshard_table_1,
)
from dlrm_sharded.datasets.table_kinds import HALVES, TABLE_KINDS
from dlrm_sharded.datasets.task_sets import TASK_SETS, paper_tasks, production_tasks
from dlrm_sharded.plans.task import GIB, ShardingTask
from dlrm_sharded.plans.validation import validate

FEASIBILITY = feasibility_tasks(3, num=60)


def memory_use(task: ShardingTask) -> float:
    return task.table_bytes / (task.topology.world_size * task.topology.memory_bytes)


@pytest.mark.parametrize("name", TASK_SETS)
def test_seeded_and_extensible(name):
    make = TASK_SETS[name]
    assert make(0, num=2) == make(0, num=1) + make(0, num=2)[1:]
    assert make(0, num=1) != make(1, num=1)
    assert len(make(0, num=2)) == 2


def test_paper_tasks():
    tasks = [benchmark.task for benchmark in paper_tasks(num=100)]
    num_tables = {len(task.tables) for task in tasks}
    assert num_tables <= set(range(10, 60))
    assert len(num_tables) > 30
    for task in tasks:
        assert task.table_bytes < 15e9
        assert task.batch_size == 65_536
        assert (task.topology.world_size, task.topology.memory_bytes) == (4, 4 * GIB)
    dims = {table.embedding_dim for task in tasks for table in task.tables}
    assert dims == {4, 8, 16, 32, 64, 128}


@pytest.mark.parametrize("number", range(len(FEASIBILITY)))
def test_a_witness_proves_that_there_is_a_plan(number):
    benchmark = FEASIBILITY[number]
    if benchmark.kind == "infeasible":
        assert benchmark.witness is None
        assert memory_use(benchmark.task) > 1
    else:
        validate(benchmark.witness, benchmark.task)


@pytest.mark.parametrize("number", range(12))
def test_tasks_of_neuroshards_first_table(number):
    """12 kinds, in turns: 4 and 8 GPUs, widths up to 4, 8, ... 128."""
    found = neuroshard_table_1(num=12)[number]
    num_gpus, max_dim = (4, 8)[number // 6], 4 * 2 ** (number % 6)
    assert found.kind == f"{num_gpus} GPUs, widths to {max_dim}"
    assert {table.embedding_dim for table in found.task.tables} <= {4, 8, 16, 32, 64, max_dim}
    assert max(table.embedding_dim for table in found.task.tables) <= max_dim
    least, most = ((10, 59), (20, 119))[number // 6]
    assert least <= len(found.task.tables) <= most
    assert found.task.table_bytes < (15e9, 31e9)[number // 6]
    topology = found.task.topology
    assert (topology.world_size, topology.compute_device) == (num_gpus, "cuda")


def test_tasks_of_the_other_papers():
    for number, found in enumerate(dreamshard_table_1(num=5)):
        assert found.kind == f"DLRM-{20 * (number + 1)} (4)"
        assert len({table.name for table in found.task.tables}) == 20 * (number + 1)
        assert {table.embedding_dim for table in found.task.tables} == {16}
    [found] = autoshard_synthetic(num=1)
    assert len({table.name for table in found.task.tables}) == 80
    assert {table.embedding_dim for table in found.task.tables} == {16, 32}
    [found] = production_tasks(num=1)
    topology = found.task.topology
    assert (len(found.task.tables), topology.world_size, topology.ranks_per_host) == (1000, 128, 8)
    assert memory_use(found.task) == pytest.approx(0.7, rel=1e-3)


@pytest.mark.parametrize("kind", TABLE_KINDS)
def test_tables_of_a_kind_come_in_halves(kind):
    halves = [TABLE_KINDS[kind](half) for half in HALVES]
    assert not {*halves[0]} & {*halves[1]}
    for half in halves:
        assert len({table.name for table in half}) == len(half)
        assert max(4 * t.num_embeddings * t.embedding_dim for t in half) <= GIB // 2


def test_varied_tables_have_the_range_of_real_ones():
    tables = TABLE_KINDS["varied"]("training")
    rows, ids = ([getattr(t, key) for t in tables] for key in ("num_embeddings", "pooling_factor"))
    assert (min(rows), max(rows)) == (3, pytest.approx(2**29 / 16, rel=0.1))
    assert (min(ids), max(ids)) == (pytest.approx(0.3, rel=0.1), pytest.approx(400, rel=0.1))
    assert sum(num_ids == 1.0 for num_ids in ids) / len(ids) == pytest.approx(0.3, abs=0.05)
