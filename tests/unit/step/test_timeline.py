"""Timelines of steps: order, overlap, waits and their causes, in numbers worked out by hand."""

import dataclasses

import numpy as np
import pytest

from dlrm_sharded.explain.step_text import parts_text
from dlrm_sharded.plans.plan_cost import INPUT_DIST, PlanCost, StageCost
from dlrm_sharded.step.breakdown import breakdown
from dlrm_sharded.step.parts import EXCHANGES, PARTS, WAITING, DenseTimes
from dlrm_sharded.step.pipelines import PIPELINES
from dlrm_sharded.step.schedule import PIPELINED, SERIAL, Overlap, step_operations
from dlrm_sharded.step.timeline import EXCHANGE, Operation, run_steps
from tests.unit.step.made_up import dense_times

DENSE = dense_times(optimizer_ms=0.5, other_ms=0.25)
COST = PlanCost((StageCost(10, 4, 5, 20), StageCost(16, 3, 6, 12)), input_dist_ms=(1.5, 2.0))
ALL_REDUCE_MS = 7.0


def _timeline(overlap: Overlap, dense: DenseTimes = DENSE, num_steps: int = 6):
    operations = step_operations(COST, dense, all_reduce_ms=ALL_REDUCE_MS, overlap=overlap)
    return run_steps(operations, num_steps=num_steps)


def test_a_serial_step_is_the_critical_path_and_the_rest():
    # every stage waits for its slowest rank, as all others end in an exchange
    stages_ms = 2.0 + 16 + 4 + 6 + 20
    assert _timeline(SERIAL).step_ms == pytest.approx(stages_ms + DENSE.total_ms + ALL_REDUCE_MS)


def test_an_exchange_hides_behind_the_layers_that_do_not_need_it():
    serial = _timeline(SERIAL).step_ms
    beside = _timeline(Overlap(exchanges=True, next_ids=False, reads_ahead=False)).step_ms
    forward_ms = 2  # of 4, beside the bottom layers
    # rank 0 updates its tables after 5 ms of exchange, beside which are the bottom layers; the
    # all-reduce begins with the end of rank 1's exchange and ends before the update
    backward_ms = (6 + 3 + 7 + 20) - (5 + 20)
    assert beside == pytest.approx(serial - forward_ms - backward_ms)


def test_ids_of_the_next_step_hide_behind_this_one():
    beside = _timeline(Overlap(exchanges=True, next_ids=False, reads_ahead=False)).step_ms
    assert _timeline(PIPELINED).step_ms < beside


@pytest.mark.parametrize(
    ("pipeline", "hidden"),
    [("sparse_dist", 2.0), ("fused_sparse_dist", 2.75), ("semi_sync", 4.0)],
)
def test_vectors_that_are_looked_up_earlier_are_exchanged_beside_more(pipeline, hidden):
    """Of 4 ms: beside the bottom layers, also the optimizer and the rest, or the backward pass."""
    known = PIPELINES[pipeline]
    overlap = dataclasses.replace(PIPELINED, next_ids=known.next_ids, next_lookup=known.next_lookup)
    times = StageCost(10, 4, 0, 20)
    operations = step_operations(
        PlanCost((times, times), input_dist_ms=(1.5, 1.5)),
        DENSE,
        all_reduce_ms=0.0,
        overlap=overlap,
    )
    found = breakdown(run_steps(operations, num_steps=6))
    computed_ms = 10 + 20 + DENSE.total_ms - DENSE.data_ms
    assert found.step_ms == pytest.approx(computed_ms + 4 - hidden)
    assert found.mean_ms("fwd_comm") == pytest.approx(4 - hidden)
    assert found.mean_hidden_ms["fwd_comm"] == pytest.approx(hidden)
    assert found.scaled(2.0).mean_hidden_ms["fwd_comm"] == pytest.approx(2 * hidden)
    assert sum(found.mean_parts_ms.values()) == pytest.approx(found.step_ms)


def test_nothing_is_hidden_where_one_thing_follows_the_other():
    found = breakdown(_timeline(SERIAL))
    assert found.mean_hidden_ms == dict.fromkeys(EXCHANGES, 0.0)
    shown = parts_text(found)
    assert "exchange 3.5," in shown
    assert "hidden" not in shown


def test_hidden_exchanges_are_named_with_what_is_exposed():
    shown = parts_text(breakdown(_timeline(PIPELINED)))
    assert "exchange 2.0 (and 1.5 hidden), " in shown
    assert "all-reduce 0.0 (and 7.0 hidden)" in shown


def test_ids_are_there_before_vectors_are_looked_up_ahead():
    """Of the next step beside the optimizer, whose ids this step redistributes."""
    for name, after, after_previous in (
        ("sparse_dist", (), (INPUT_DIST,)),
        ("fused_sparse_dist", (INPUT_DIST,), ()),
        ("semi_sync", (), (INPUT_DIST,)),
    ):
        known = PIPELINES[name]
        overlap = dataclasses.replace(PIPELINED, next_lookup=known.next_lookup)
        timeline = _timeline(overlap)
        lookup = timeline.operations[timeline.place("fwd_compute")]
        assert (lookup.after, lookup.after_previous) == (after, after_previous), name


@pytest.mark.parametrize(("exchanges", "next_ids"), [(False, False), (True, False), (True, True)])
def test_reading_ahead_costs_time_only_if_it_takes_longer_than_the_step(exchanges, next_ids):
    ahead = Overlap(exchanges=exchanges, next_ids=next_ids, reads_ahead=True)
    read_before = _timeline(dataclasses.replace(ahead, reads_ahead=False)).step_ms
    assert _timeline(ahead).step_ms <= read_before - DENSE.data_ms * (not next_ids)
    slow = dataclasses.replace(DENSE, data_ms=500.0)
    reading = _timeline(ahead, slow, num_steps=20)
    assert reading.step_ms == pytest.approx(500.0, rel=0.002)  # the pipeline fills at first
    found = breakdown(reading)
    assert found.step_ms == pytest.approx(500.0, rel=0.002)
    # nor are ids exchanged for so long, which need what is read
    assert found.mean_ms("data") > 490.0 - read_before
    assert found.mean_ms(INPUT_DIST) <= 2.0


@pytest.mark.parametrize("overlap", [SERIAL, PIPELINED], ids=["serial", "pipelined"])
def test_parts_sum_to_the_step_on_every_rank(overlap):
    timeline = _timeline(overlap)
    found = breakdown(timeline)
    assert set(found.parts_ms) == set(PARTS)
    sums = np.sum(list(found.parts_ms.values()), axis=0)
    assert sums == pytest.approx([timeline.step_ms] * 2)
    assert all((times >= 0).all() for times in found.parts_ms.values())


def test_the_rank_that_comes_last_is_the_cause_of_the_wait():
    found = breakdown(_timeline(SERIAL))
    waits = {wait.operation: wait for wait in found.waits}
    assert waits["fwd_comm"].cause == 1
    # 6 ms more of lookups, behind ids that came 0.5 ms later
    assert waits["fwd_comm"].waiting_ms == pytest.approx([6.5, 0.0])
    assert waits["fwd_comm"].caused_ms == pytest.approx(3.25)
    assert found.parts_ms[WAITING].sum() == pytest.approx(
        sum(wait.waiting_ms.sum() for wait in found.waits)
    )


def test_variation_makes_ranks_wait_and_depends_on_the_seed_alone():
    even = PlanCost((StageCost(10, 4, 4, 10),) * 8, input_dist_ms=(1.0,) * 8)
    varied = DenseTimes(**(DENSE.to_json() | {"spread": 0.1}))
    operations = step_operations(even, varied, all_reduce_ms=1.0, overlap=SERIAL)
    first, again, other = (run_steps(operations, num_steps=200, seed=seed) for seed in (1, 1, 2))
    still = run_steps(step_operations(even, DENSE, all_reduce_ms=1.0, overlap=SERIAL))
    assert first.step_ms > still.step_ms
    assert first.step_ms == again.step_ms != other.step_ms
    assert breakdown(still).mean_ms(WAITING) == 0


def test_an_exchange_behind_another_one_counts_as_exchange_and_not_as_waiting():
    def operation(name, part, time_ms, **keys):
        return Operation(name=name, part=part, times_ms=np.full(2, time_ms), **keys)

    operations = [
        operation("first", "fwd_comm", 4.0, stream=EXCHANGE),
        operation("second", "bwd_comm", 2.0, stream=EXCHANGE, is_collective=True),
        operation("use", "fwd_compute", 1.0, after=("second",)),
    ]
    found = breakdown(run_steps(operations, num_steps=1))
    assert found.mean_ms("fwd_comm") == pytest.approx(4.0)
    assert found.mean_ms("bwd_comm") == pytest.approx(2.0)
    assert found.mean_ms(WAITING) == 0
