"""Tasks to train on: what they are drawn from, and that tensors of them are those of the tasks."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from dlrm_sharded.accesses.profiles import with_profiles
from dlrm_sharded.datasets.table_kinds import TABLE_KINDS, paper_tables
from dlrm_sharded.plans.task import ShardingTask
from dlrm_sharded.rl.task_tensors import WORK_NAMES, TaskTensors, table_tensors
from dlrm_sharded.rl.tasks import TableSet, TaskPool
from tests.unit.rl.cases import random_tables, yaml_pool
from tests.unit.synthetic import USED_ONCE, tables_of, task_of


def pool_of_two_batch_sizes() -> TaskPool:
    first = random_tables(30)
    unmeasured = [dataclasses.replace(table, reuse_histogram=None) for table in first.tables]
    second = TableSet.from_tables(unmeasured, 256)
    return TaskPool((first, second), 7, 3, full=(0.4, 0.6), largest=0.5, few_widths=0.5)


def test_tensors_are_those_of_the_tasks() -> None:
    pool = pool_of_two_batch_sizes()
    rng = np.random.default_rng(0)
    drawn = [pool.draw(rng) for _ in range(12)]
    tasks = [pool.task(task) for task in drawn]
    assert {task.batch_size for task in tasks} == {256, 4096}
    widths = [len({table.embedding_dim for table in task.tables}) for task in tasks]
    assert min(widths) <= 2 < max(widths)
    found, expected = pool.tensors(drawn), TaskTensors.from_tasks(tasks)
    for field in dataclasses.fields(TaskTensors):
        torch.testing.assert_close(getattr(found, field.name), getattr(expected, field.name))


def test_tasks_take_the_share_of_memory_that_they_shall() -> None:
    pool = pool_of_two_batch_sizes()
    rng = np.random.default_rng(0)
    for _ in range(50):
        task = pool.task(pool.draw(rng))
        memory_bytes = task.topology.memory_bytes
        sizes = [task.topology.table_bytes(table) for table in task.tables]
        use = sum(sizes) / (3 * memory_bytes)
        assert use < 0.6001
        assert max(sizes) / memory_bytes < 0.5001
        # less is used only where the largest table needs larger ranks
        assert use > 0.3999 or max(sizes) / memory_bytes > 0.4999


def test_every_kind_at_every_batch_size(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind, tables in TABLE_KINDS.items():
        monkeypatch.setitem(TABLE_KINDS, kind, lambda half, tables=tables: tables(half)[:20])
    pool = yaml_pool(tables=list(TABLE_KINDS), batch_sizes=[256, 512], num_tables=5, world_size=2)
    rng = np.random.default_rng(0)
    drawn = {(task.set_index, pool.task(task).batch_size) for task in map(pool.draw, [rng] * 60)}
    assert drawn == {(0, 256), (1, 512), (2, 256), (3, 512)}


def test_measured_histograms_are_those_of_their_batch_size_alone(tmp_path: Path) -> None:
    tables = tables_of(*[(1000, 8, 2.0, USED_ONCE)] * 3)  # as no cost model assumes
    path = tmp_path / "task.json"
    path.write_text(json.dumps(task_of(tables, batch_size=512).to_json()))
    pool = yaml_pool(tables=[str(path)], batch_sizes=[512, 1024])
    same, other = pool.sets
    assert {table.reuse_histogram for table in same.tables} == {USED_ONCE}
    assert USED_ONCE not in {table.reuse_histogram for table in other.tables}


def test_half_of_the_tables_have_patterns_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TABLE_KINDS, "papers", lambda half: paper_tables(half)[:100])
    pool = yaml_pool(tables=["papers"], batch_sizes=[512], few_widths=0.0)
    task = pool.task(pool.draw(np.random.default_rng(0)))
    patterns = pool.accesses(task)
    assert len(patterns) / len(task.tables) == pytest.approx(0.5, abs=0.2)
    assumed = {table.name: table for table in with_profiles(unprofiled(task)).tables}
    for table in task.tables:
        if table.name not in patterns:
            assert table == assumed[table.name]
            continue
        num_ids = 512 * table.pooling_factor
        expected = patterns[table.name].distribution(table.num_embeddings, num_ids)
        assert table.reuse_histogram == expected.expected_reuse_histogram(num_ids)


def unprofiled(task: ShardingTask) -> ShardingTask:
    return task.with_values(reuse_histogram=dict.fromkeys(t.name for t in task.tables))


def test_each_feature_of_a_table_has_pooled_columns() -> None:
    tables = tables_of((100, 16, 4.0), (100, 16, 4.0))
    tables = (tables[0], dataclasses.replace(tables[1], num_features=3))
    _, work = table_tensors(tables, 64)
    assert work[:, WORK_NAMES.index("pooled_columns")].tolist() == [64 * 16, 3 * 64 * 16]
