"""The calibrated model: what its form promises, and how well it learns synthetic hardware."""

import dataclasses
import logging
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from dlrm_sharded import RunContext, Shard
from dlrm_sharded.calibration.prediction_errors import prediction_errors
from dlrm_sharded.calibration.samples import Sample, workload_of_sample
from dlrm_sharded.cost.exchange_terms import Hosts
from dlrm_sharded.cost.gpu_prior import gpu_cost_model
from dlrm_sharded.cost.learned import LearnedCostModel
from dlrm_sharded.cost.workload import workload_of_plan
from dlrm_sharded.plans.tables import Table
from tests.unit.cost.plans import (
    COMPUTING,
    EXCHANGING,
    Planned,
    are_times,
    none_lower,
    planned,
    relabellings,
    tables,
    times_ms,
)
from tests.unit.synthetic import USED_ONCE, in_turns, task_of


@given(of=planned())
def test_times_are_times(model: LearnedCostModel, of: Planned) -> None:
    """Finite and never negative, and nothing where there is nothing to compute."""
    cost = model.predict(*of)
    assert are_times(cost)
    used = {shard.rank for shard in of[0].shards}
    for rank, stages in enumerate(cost.per_rank):
        computing = [stages.stage_ms(stage) for stage in COMPUTING]
        assert all(time > 0 for time in computing) if rank in used else computing == [0.0, 0.0]
    assert len(cost.input_dist_ms) == len(cost.per_rank)
    assert all(time >= 0 and np.isfinite(time) for time in cost.input_dist_ms)


@given(of=planned(), data=st.data())
def test_a_further_shard_never_costs_less(
    model: LearnedCostModel, of: Planned, data: st.DataObject
) -> None:
    plan, task = of
    table = data.draw(tables("further"))
    rank = data.draw(st.integers(0, plan.world_size - 1))
    more = dataclasses.replace(plan, shards=(*plan.shards, Shard.whole(table, rank)))
    before = model.predict(plan, task)
    after = model.predict(more, dataclasses.replace(task, tables=(*task.tables, table)))
    assert none_lower(after, before)
    for other in set(range(plan.world_size)) - {rank}:
        for stage in COMPUTING:
            before_ms, after_ms = (cost.per_rank[other].stage_ms(stage) for cost in (before, after))
            assert after_ms == pytest.approx(before_ms, rel=1e-12)


@given(of=planned(), data=st.data())
def test_more_columns_never_cost_less(
    model: LearnedCostModel, of: Planned, data: st.DataObject
) -> None:
    plan, task = of
    table = data.draw(st.sampled_from(task.tables))
    # all sequences of a module have one width
    assume(table.pooled or [other.module for other in task.tables].count(table.module) == 1)
    width = table.embedding_dim + 4 * data.draw(st.integers(1, 64))
    wider = tuple(
        dataclasses.replace(shard, cols=(shard.cols[0], width))
        if shard.table == table.name and shard.cols[1] == table.embedding_dim
        else shard
        for shard in plan.shards
    )
    with_wider = task.with_values(embedding_dim={table.name: width})
    after = model.predict(dataclasses.replace(plan, shards=wider), with_wider)
    assert none_lower(after, model.predict(plan, task))


@given(of=planned(), data=st.data(), factor=st.floats(1.0, 100.0))
def test_more_ids_never_cost_less(
    model: LearnedCostModel, of: Planned, data: st.DataObject, factor: float
) -> None:
    plan, task = of
    table = data.draw(st.sampled_from(task.tables))
    more = task.with_values(pooling_factor={table.name: table.pooling_factor * factor})
    assert none_lower(model.predict(plan, more), model.predict(plan, task))


@given(of=planned(), data=st.data())
def test_ranks_have_no_numbers(model: LearnedCostModel, of: Planned, data: st.DataObject) -> None:
    """Other names for the ranks: the same costs under other names, and nothing else."""
    workload, hosts = workload_of_plan(*of), model.cost_task(of[1]).hosts
    new_rank = data.draw(relabellings(of[1].topology))
    renamed = dataclasses.replace(workload, rank=np.array(new_rank)[workload.rank])
    before, after = (model.predict_workload(named, hosts) for named in (workload, renamed))
    expected = [before.per_rank[new_rank.index(rank)] for rank in range(hosts.world_size)]
    for stages, found in zip(expected, after.per_rank, strict=True):
        assert dataclasses.astuple(found) == pytest.approx(dataclasses.astuple(stages), rel=1e-9)
    renamed_ids = [after.input_dist_ms[rank] for rank in new_rank]
    assert renamed_ids == pytest.approx(before.input_dist_ms, rel=1e-9)


@given(of=planned(max_hosts=1, layouts=("whole", "columns")))
def test_one_rank_has_nobody_to_talk_to(model: LearnedCostModel, of: Planned) -> None:
    workload = workload_of_plan(*of)
    on_one = dataclasses.replace(
        workload, world_size=1, ranks_per_host=1, rank=np.zeros_like(workload.rank)
    )
    cost = model.predict_workload(on_one, Hosts(1, 1))
    assert times_ms(cost, EXCHANGING) == [[0.0], [0.0]]
    assert cost.input_dist_ms == (0.0,)
    assert cost.cost_ms == cost.critical_path_ms > 0


def uniform(name: str = "t", **changes: Any) -> Table:
    """A table whose batches use every id once."""
    return dataclasses.replace(Table(name, 10**9, 64, 10.0, USED_ONCE), **changes)


def cost_of(model: LearnedCostModel, *of: Table, world_size: int = 1) -> list[list[float]]:
    """[stages, ranks], of whole tables, one rank after the other."""
    task = task_of(of, world_size, 10**15, 4096)
    return times_ms(model.predict(in_turns(task), task))


def beyond(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if "extrapolates" in record.message]


def test_says_what_it_extrapolates(
    model: LearnedCostModel, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    cost_of(model, uniform(num_embeddings=10**6), uniform("b"), world_size=2)
    known = beyond(caplog)
    caplog.clear()
    cost_of(model, uniform(embedding_dim=2**14), uniform("b"), world_size=2)
    assert len(beyond(caplog)) == len(known) + 1
    message = next(text for text in beyond(caplog) if "columns" in text)
    assert "columns of a shard 64 to 16,384" in message
    assert "of synthetic" in message


def test_tables_without_a_profile(model: LearnedCostModel) -> None:
    known = task_of((uniform("a"), uniform("b")), 2, 10**15, 4096)
    plan, unknown = in_turns(known), known.with_values(reuse_histogram={"b": None})
    expected = model.predict(plan, known)
    cost = model.predict(plan, unknown)
    assert are_times(cost)
    assert cost.per_rank[0] == expected.per_rank[0]
    # what is assumed is skewed, so it reads less than ids that are all different
    assert 0 < cost.per_rank[1].fwd_compute_ms < expected.per_rank[1].fwd_compute_ms


def test_a_fit_learns_the_synthetic_hardware(
    model: LearnedCostModel, unseen: tuple[Sample, ...]
) -> None:
    errors = prediction_errors(
        (model.predict_workload(workload_of_sample(sample), sample.hosts), sample)
        for sample in unseen
    )
    mape = {name: row["mape"] for name, row in errors.items()}
    assert mape["plan, critical path"] <= 15.0, mape
    assert max(mape["forward computation"], mape["backward computation"]) <= 15.0, mape
    assert mape["forward communication, 2 ranks"] <= 25.0, mape


@pytest.mark.parametrize(
    ("stated", "measured", "unknown"),
    [({}, (), ["intra", "inter"]), ({"inter_host_bytes_per_s": 1e9}, ("intra",), [])],
)
def test_links_are_unknown_unless_measured_or_stated(
    stated: dict[str, float], measured: tuple[str, ...], unknown: list[str]
) -> None:
    model = dataclasses.replace(gpu_cost_model(RunContext("cuda")), measured_links=measured)
    task = task_of([uniform()], 4, local_world_size=2, device="cuda", **stated)
    assert model.unknown_links(task.topology) == unknown
