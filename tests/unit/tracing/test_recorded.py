"""Recorded steps: what a rank did at each moment, who waited for whom, and what stands out."""

from dataclasses import replace

import numpy as np
import pytest

from dlrm_sharded.step.parts import ALL_REDUCE, DATA, DENSE_BACKWARD, DENSE_FORWARD, OTHER, WAITING
from dlrm_sharded.tracing.findings import find
from dlrm_sharded.tracing.kernels import (
    device_collectives,
    device_segments,
    device_steps,
    kernel_segments,
)
from dlrm_sharded.tracing.recorded import BETWEEN_STEPS, RecordedRank, break_down
from dlrm_sharded.tracing.recorded_spans import recorded_spans, rows
from dlrm_sharded.tracing.regions import (
    Collective,
    Event,
    Segment,
    SegmentAt,
    host_collectives,
    merged,
    modules_by_sequence,
    thread_segments,
    with_all_reduce,
)
from dlrm_sharded.tracing.trace_text import finding_lines, summary_lines

NODE = "autograd::engine::evaluate_function: "
STEP_MS = 20.0
NUM_STEPS = 3


def test_time_belongs_to_the_innermost_event():
    events = [
        Event("## forward ##", 0, 10),
        Event("module over_arch", 2, 8),
        Event("aten::linear", 3, 7, sequence=5),
        Event("aten::addmm", 4, 6, sequence=5),
        Event("dlrm_sharded/fwd_compute", 8, 9),
        Event("## backward ##", 10, 20),
        Event(f"{NODE}AddmmBackward0", 11, 14, sequence=5),
        Event("aten::mm", 12, 13),
        Event(f"{NODE}All2All_Pooled_WaitBackward", 14, 15),
    ]
    found = thread_segments(events, modules_by_sequence(events))
    assert sum(s.end_ms - s.begin_ms for s in found) == 20
    at = SegmentAt(found)
    assert at(5) == Segment(DENSE_FORWARD, 4, 6, "aten::addmm", "over_arch")
    assert at(6.5) == Segment(DENSE_FORWARD, 6, 7, "aten::linear", "over_arch")
    assert at(8.5) == Segment("fwd_compute", 8, 9)
    assert at(12.5) == Segment(DENSE_BACKWARD, 12, 13, "aten::mm", "over_arch")
    assert at(14.5) == Segment("bwd_comm", 14, 15)
    assert at(21) is None
    joined = [(s.part, s.begin_ms, s.end_ms) for s in merged(found)]
    assert joined[0] == (DENSE_FORWARD, 0, 8)


def test_events_of_one_length_and_those_that_overlap_are_nested():
    events = [Event("## forward ##", 0, 4), Event("aten::mm", 0, 4), Event("aten::add", 3, 4.001)]
    found = thread_segments(events, {})
    assert [(s.operator, s.begin_ms, s.end_ms) for s in found] == [
        ("aten::mm", 0, 3),
        ("aten::add", 3, 4),
    ]


@pytest.mark.parametrize("is_reduced", [True, False])
def test_the_end_of_a_backward_pass_is_the_all_reduce(is_reduced):
    events = [
        Event("## backward ##", 0, 10),
        Event(f"{NODE}torch::autograd::AccumulateGrad", 2, 4),
        Event("c10d::allreduce_" if is_reduced else "aten::add_", 2.5, 3),
    ]
    found = with_all_reduce(thread_segments(events, {}), events)
    tail = next(segment for segment in found if segment.end_ms == 10)
    assert (tail.begin_ms, tail.part) == (4, ALL_REDUCE if is_reduced else DENSE_BACKWARD)


def test_exchanges_of_the_host_end_with_the_work_of_gloo():
    events = [
        Event("dlrm_sharded/fwd_comm", 0, 3),
        Event("c10d::alltoall_base_", 1, 2),
        Event("gloo:all_to_all", 1.5, 6, thread=9),
        Event("## backward ##", 7, 9),
        Event("c10d::allreduce_", 7.5, 8),
    ]
    at = {0: SegmentAt(thread_segments(events[:2] + events[3:], {}))}
    assert host_collectives(events, at) == [
        Collective("fwd_comm", 1, 6),
        Collective(ALL_REDUCE, 7.5, 8),
    ]


def _rank(arrival_ms, *, late_part="fwd_compute", transfer_ms=2.0, last_ms=None, extra=()):
    """A rank whose step is lookup, exchange, layers; it comes to the exchange after some time."""
    last_ms = arrival_ms if last_ms is None else last_ms
    segments, collectives, steps = [], [], []
    for step in range(NUM_STEPS):
        begin = step * STEP_MS
        end = begin + last_ms + transfer_ms
        segments += [
            Segment(late_part, begin, begin + arrival_ms),
            Segment("fwd_comm", begin + arrival_ms, end),
            Segment(DENSE_FORWARD, end, begin + STEP_MS - 1),
        ]
        collectives.append(Collective("fwd_comm", begin + arrival_ms, end))
        steps.append((begin, begin + STEP_MS))
    dense_ms = sum(s.end_ms - s.begin_ms for s in segments if s.part == DENSE_FORWARD)
    operators = {
        (DENSE_FORWARD, "aten::mm", "over_arch.waste"): 0.9 * dense_ms,
        (DENSE_FORWARD, "aten::add", ""): 0.1 * dense_ms,
    }
    return RecordedRank(tuple(steps), tuple(segments), tuple(collectives), operators)


def test_ranks_wait_until_the_last_one_has_come():
    found = break_down([_rank(4, last_ms=10), _rank(10)])
    parts = found.breakdown.parts_ms
    for part, times in (
        ("fwd_compute", (4, 10)),
        (WAITING, (6, 0)),
        ("fwd_comm", (2, 2)),
        (DENSE_FORWARD, (7, 7)),
        (OTHER, (1, 1)),
    ):
        assert parts[part] == pytest.approx(times), part
    assert sum(parts.values()) == pytest.approx([STEP_MS, STEP_MS])
    [wait] = found.breakdown.waits
    assert (wait.operation, wait.cause) == ("fwd_comm", 1)
    assert wait.waiting_ms == pytest.approx([6, 0])
    late = found.late_with(1, "fwd_comm")
    assert (late.part, late.excess_ms) == ("fwd_compute", pytest.approx(6))
    assert found.late_with(0, "fwd_comm") is None
    assert found.transfer_ms["fwd_comm"] == pytest.approx([2, 2])


def test_clocks_that_differ_are_put_right():
    apart = _rank(10).moved(1e9)
    found = break_down([_rank(4, last_ms=10), apart.moved(-1e9)])
    assert found.breakdown.parts_ms[WAITING] == pytest.approx([6, 0], abs=1e-3)


def test_a_rank_that_begins_late_is_late_with_what_is_between_steps():
    slow = _rank(10)
    segments = [
        replace(s, begin_ms=s.begin_ms + 6) if s.part == "fwd_compute" else s for s in slow.segments
    ]
    steps = [(begin + 6, end) for begin, end in slow.steps]
    late = replace(slow, segments=tuple(segments), steps=tuple(steps))
    found = break_down([_rank(4, last_ms=10), late])
    assert found.late_with(1, "fwd_comm").part == BETWEEN_STEPS


def test_a_straggler_is_named_with_its_tables_or_its_data():
    def lines(part):
        ranks = [_rank(4, late_part=part, last_ms=10), _rank(10, late_part=part)]
        steps = break_down(ranks)
        return finding_lines(find(steps, ranks, {}), lambda rank: [f"big{rank}", "small"])

    [line] = lines("fwd_compute")
    assert line.startswith("the other ranks wait for rank 1 for 6.00 ms a step")
    assert "big1, small" in line
    [line] = lines(DATA)
    assert "reads its batches 6.00 ms longer" in line
    [line] = lines(DENSE_BACKWARD)
    assert "the dense backward takes it 6.00 ms longer than the others (not its tables)" in line


def test_a_slow_link_is_told_from_a_rank_that_is_late():
    ranks = [_rank(4, transfer_ms=9.0), _rank(4, transfer_ms=9.0)]
    steps = break_down(ranks)
    assert not steps.breakdown.waits
    expected = {"fwd_comm": np.array([1.5, 2.0])}
    findings = find(steps, ranks, expected)
    [line] = finding_lines(findings, lambda rank: [])
    assert "the exchange of pooled vectors is slow: 9.00 ms after all ranks have come" in line
    late = [_rank(4, last_ms=13), _rank(13)]
    assert not find(break_down(late), late, expected).slow_exchanges


def test_a_wasteful_operator_is_named():
    ranks = [_rank(4), _rank(4)]
    findings = find(break_down(ranks), ranks, {DENSE_FORWARD: np.array([1.0, 1.0])})
    [line] = finding_lines(findings, lambda rank: [])
    assert "the dense forward is costly" in line
    assert "aten::mm in over_arch.waste 11.70 ms" in line


def test_nothing_stands_out():
    ranks = [_rank(4), _rank(4.1)]
    steps = break_down(ranks)
    expected = {DENSE_FORWARD: np.array([12.0, 12.0]), "fwd_comm": np.array([2.0, 2.0])}
    findings = find(steps, ranks, expected)
    assert finding_lines(findings, lambda rank: []) == ["no rank, exchange or part stands out"]
    assert "takes 20.00 ms" in summary_lines(steps, clock_uncertainty_ms=0.0)[0]
    assert "0.250 ms" in summary_lines(steps, clock_uncertainty_ms=0.25)[-1]


def test_one_rank_waits_for_nobody():
    found = break_down([_rank(4)])
    assert not found.breakdown.waits
    assert found.breakdown.step_ms == pytest.approx(STEP_MS)


def test_exchanges_under_way_together_have_rows_of_their_own():
    rank = RecordedRank(
        ((0.0, 10.0),), (), (Collective("bwd_comm", 1, 6), Collective(ALL_REDUCE, 2, 4))
    )
    spans = recorded_spans(break_down([rank]), [rank], first_step=7)
    assert rows(spans) == ["steps", "parts", "exchanges", "exchanges 2"]
    assert spans[0].name == "step 7"


def _kernel(name, begin, end, launched, *, stream=7):
    return Event(name, begin, end, stream=stream, launch=(0, launched))


def test_kernels_on_several_streams():
    """Computation hides an exchange, an exchange hides a copy, and else the host is to blame."""
    host = thread_segments(
        [
            Event("## forward ##", 0, 2),
            Event("dlrm_sharded/fwd_compute", 0.2, 0.4),
            Event("dlrm_sharded/fwd_comm", 0.4, 0.6),
            Event("## backward ##", 2, 3),
            Event("## load batch 7 from dataloader (host) ##", 3, 20),
        ],
        {},
    )
    kernels = kernel_segments(
        [
            _kernel("lookup_kernel", 1, 4, 0.3),
            _kernel("ncclDevKernel_SendRecv", 4, 10, 0.5, stream=20),
            _kernel("gemm", 4, 7, 1.0),
            _kernel("gemm", 10, 12, 1.5),
            _kernel("ncclDevKernel_AllReduce", 12, 13, 2.5, stream=21),
            _kernel("Memcpy HtoD", 9, 14, 3.5, stream=22),
        ],
        {0: SegmentAt(host)},
    )
    spans = [(s.part, s.begin_ms, s.end_ms) for s in merged(device_segments(kernels, host))]
    assert spans == [
        (OTHER, 0, 1),
        ("fwd_compute", 1, 4),
        (DENSE_FORWARD, 4, 7),
        ("fwd_comm", 7, 10),
        (DENSE_FORWARD, 10, 12),
        (ALL_REDUCE, 12, 13),
        (DATA, 13, 20),
    ]
    assert device_collectives(kernels) == [
        Collective("fwd_comm", 4, 10),
        Collective(ALL_REDUCE, 12, 13),
    ]


def test_a_gpu_waits_within_its_exchange_kernel():
    def rank(arrival):
        kernels = kernel_segments(
            [_kernel("gemm", 0, arrival, 0.1), _kernel("nccl", arrival, 9, 0.2, stream=20)],
            {0: SegmentAt([Segment("fwd_comm", 0, 1)])},
        )
        segments = tuple(device_segments(kernels, []))
        return RecordedRank(((0.0, 9.0),), segments, tuple(device_collectives(kernels)))

    found = break_down([rank(3), rank(8)])
    assert found.breakdown.parts_ms[WAITING] == pytest.approx([5, 0])
    assert found.transfer_ms["fwd_comm"] == pytest.approx([9 - 8 + 3, 1 + 8])


def test_steps_of_a_device_end_with_their_last_computation():
    steps = [(0.0, 5.0), (5.0, 10.0), (10.0, 15.0)]
    kernels = kernel_segments(
        [
            _kernel("gemm", 2, 8, 1.0),
            _kernel("gemm", 9, 14, 6.0),
            _kernel("nccl", 14, 30, 7.0, stream=20),
            _kernel("gemm", 14, 21, 11.0),
        ],
        {},
    )
    assert device_steps(kernels, steps) == [(8, 14), (14, 21)]
