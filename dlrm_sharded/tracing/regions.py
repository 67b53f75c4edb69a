"""Turns the events of a profiler into what a rank did at each moment, by part of the step.

On a CPU, a rank's time is that of its main thread. On a GPU, it is that of its kernels: a kernel
belongs to the part in which the host launched it, and time without a kernel is the host's fault.

Glossary:
    event    something with a name that a thread or a stream did, as the profiler notes it
    region   an event whose name tells its part; events within it belong to the same part
    segment  a time in which a rank did one thing; segments of a rank do not overlap
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from dlrm_sharded.plans.plan_cost import BWD_COMM, BWD_COMPUTE, FWD_COMM, INPUT_DIST
from dlrm_sharded.step.parts import (
    ALL_REDUCE,
    DATA,
    DENSE_BACKWARD,
    DENSE_FORWARD,
    OPTIMIZER,
    OTHER,
)

STAGE_PREFIX = "dlrm_sharded/"
"""Beginning of the names of regions that the recorder adds; the part follows."""

MODULE_PREFIX = "module "
"""Beginning of the names of events that are calls of a layer; its path in the model follows."""

BACKWARD_REGION = "## backward"
NODE_PREFIX = "autograd::engine::evaluate_function: "

REGIONS = (
    # TorchRec's own regions, and the nodes of autograd; the first pattern that matches counts
    (r"## (load batch|next_batch|(inplace_)?copy_batch_to_gpu|wait_for_batch)", DATA),
    (r"## ((start|wait)_sparse_data_dist|runtime_forward_assemble_KJT)", INPUT_DIST),
    (r"## \w*(KJT|SplitsAllToAll)\w*Awaitable wait", INPUT_DIST),
    (r"## (EmbeddingBagCollection|VariableBatch|PooledEmbeddings)\w*Awaitable wait", FWD_COMM),
    (r"## forward", DENSE_FORWARD),
    (r"## (zero_grad|optimizer)", OPTIMIZER),
    (BACKWARD_REGION, DENSE_BACKWARD),
    (NODE_PREFIX + r".*(All2All|ReduceScatter|AllGather)\w*Backward", BWD_COMM),
    (NODE_PREFIX + r".*PermutePooledEmbs", BWD_COMM),
    (NODE_PREFIX + r".*SplitLookupFunction", BWD_COMPUTE),
    (NODE_PREFIX, DENSE_BACKWARD),
)
_PATTERNS = tuple((re.compile(pattern), part) for pattern, part in REGIONS)

COLLECTIVES = {
    # operators of torch.distributed, and what gloo calls the work that they begin
    "c10d::alltoall_base_": "gloo:all_to_all",
    "c10d::alltoall_": "gloo:all_to_all",
    "c10d::allreduce_": "gloo:all_reduce",
    "c10d::_reduce_scatter_base_": "gloo:_reduce_scatter_base",
    "c10d::reduce_scatter_": "gloo:reduce_scatter",
    "c10d::_allgather_base_": "gloo:_all_gather_base",
    "c10d::allgather_": "gloo:all_gather",
}


@dataclass(frozen=True, slots=True)
class Event:
    """Something that a thread of the host or a stream of the device did, in ms.

    Args:
        sequence: number of an operator that autograd gives to its backward pass, too; -1 for none.
        stream: stream of a kernel; None for an event of the host.
        launch: thread and time of the host's call that launched a kernel; None if not known.
    """

    name: str
    begin_ms: float
    end_ms: float
    thread: int = 0
    sequence: int = -1
    stream: int | None = None
    launch: tuple[int, float] | None = None


@dataclass(frozen=True, slots=True)
class Segment:
    """A time in which a rank did one thing.

    Args:
        part: one of `PARTS`.
        operator: innermost operator or kernel; empty for Python between operators.
        module: path of the layer that called it, or whose gradient it computes; empty for none.
    """

    part: str
    begin_ms: float
    end_ms: float
    operator: str = ""
    module: str = ""


@dataclass(frozen=True, slots=True)
class Collective:
    """An exchange on one rank, in ms.

    Args:
        arrival_ms: when the rank was ready for it.
        end_ms: when the rank's data were there; never before the last rank's arrival.
    """

    part: str
    arrival_ms: float
    end_ms: float


def part_of(name: str) -> str | None:
    """Return the part that the name of an event tells; None if it tells none."""
    if name.startswith(STAGE_PREFIX):
        return name.removeprefix(STAGE_PREFIX)
    return next((part for pattern, part in _PATTERNS if pattern.match(name)), None)


def is_operator(name: str) -> bool:
    """Return whether an event is an operator, and not a region of Python or of autograd."""
    return "::" in name and not name.startswith(("autograd::", STAGE_PREFIX, MODULE_PREFIX))


def thread_segments(events: Iterable[Event], modules: Mapping[int, str]) -> list[Segment]:
    """Divide the time of one thread among its innermost events; time without an event is left out.

    Args:
        modules: layer of each operator that has a backward pass, see `modules_by_sequence`.
    """
    segments: list[Segment] = []
    stack: list[tuple[float, Segment]] = []  # (end, what the event is without its inner events)
    clock = float("-inf")

    def pass_until(until_ms: float) -> None:
        nonlocal clock
        if stack and until_ms > clock:
            segments.append(replace(stack[-1][1], begin_ms=clock, end_ms=until_ms))
        clock = max(clock, until_ms)

    def leave_until(until_ms: float) -> None:
        while stack and stack[-1][0] <= until_ms:
            pass_until(stack[-1][0])
            stack.pop()
        pass_until(until_ms)

    for event in _outermost_first(events):
        leave_until(event.begin_ms)
        outer = stack[-1][1] if stack else Segment(OTHER, 0.0, 0.0)
        end_ms = min(event.end_ms, stack[-1][0]) if stack else event.end_ms
        stack.append((end_ms, _within(outer, event, modules)))
    leave_until(float("inf") if not stack else max(end for end, _ in stack))
    return segments


def _within(outer: Segment, event: Event, modules: Mapping[int, str]) -> Segment:
    """Describe an event within another one; what its name does not tell is as outside."""
    name = event.name
    if name.startswith(MODULE_PREFIX):
        return replace(outer, module=name.removeprefix(MODULE_PREFIX))
    if name.startswith(NODE_PREFIX):
        return Segment(part_of(name) or outer.part, 0.0, 0.0, "", modules.get(event.sequence, ""))
    if is_operator(name):
        return replace(outer, operator=name)
    return replace(outer, part=part_of(name) or outer.part)


def _outermost_first(events: Iterable[Event]) -> list[Event]:
    return sorted(events, key=lambda event: (event.begin_ms, -event.end_ms))


def modules_by_sequence(events: Iterable[Event]) -> dict[int, str]:
    """Return the layer of each operator with a backward pass, by its number."""
    found: dict[int, str] = {}
    stack: list[Event] = []
    for event in _outermost_first(events):
        while stack and stack[-1].end_ms <= event.begin_ms:
            stack.pop()
        if event.name.startswith(MODULE_PREFIX):
            stack.append(event)
        elif stack and event.sequence >= 0 and is_operator(event.name):
            # an operator shares its number with calls before it that need no gradient
            found[event.sequence] = stack[-1].name.removeprefix(MODULE_PREFIX)
    return found


def with_all_reduce(segments: Iterable[Segment], events: Sequence[Event]) -> list[Segment]:
    """Give the end of each backward pass, after its last node, to the all-reduce of gradients.

    DDP waits there for its buckets, in no region; on one rank there is none.
    """
    tails = []
    for region in events:
        if not region.name.startswith(BACKWARD_REGION):
            continue
        inside = [e for e in events if region.begin_ms <= e.begin_ms < region.end_ms]
        nodes = [e.end_ms for e in inside if e.name.startswith(NODE_PREFIX)]
        if nodes and any(event.name == "c10d::allreduce_" for event in inside):
            tails.append((max(nodes), region.end_ms))
    starts = [begin for begin, _ in tails]
    result = []
    for segment in segments:
        place = bisect_right(starts, segment.begin_ms) - 1
        is_tail = place >= 0 and segment.end_ms <= tails[place][1]
        is_tail = is_tail and segment.part == DENSE_BACKWARD
        result.append(replace(segment, part=ALL_REDUCE) if is_tail else segment)
    return result


class SegmentAt:
    """Finds the segment of a thread at some time."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        self._segments = segments
        self._begins = [segment.begin_ms for segment in segments]

    def __call__(self, time_ms: float) -> Segment | None:
        place = bisect_right(self._begins, time_ms) - 1
        if place < 0 or self._segments[place].end_ms < time_ms:
            return None
        return self._segments[place]


def host_collectives(
    events: Sequence[Event], segment_at: Mapping[int, SegmentAt]
) -> list[Collective]:
    """Return the exchanges that the host's threads began, and gloo's threads ended.

    gloo's work has the order in which it was issued, for each kind of collective.
    """
    issued: dict[str, list[Event]] = {}
    ended: dict[str, list[float]] = {}
    for event in _outermost_first(events):
        if event.name in COLLECTIVES:
            issued.setdefault(COLLECTIVES[event.name], []).append(event)
        elif event.name.startswith("gloo:"):
            ended.setdefault(event.name, []).append(event.end_ms)
    found = []
    for kind, calls in issued.items():
        ends = ended.get(kind, [])
        if len(ends) != len(calls):  # other work of that kind was under way
            ends = [call.end_ms for call in calls]
        for call, end_ms in zip(calls, ends, strict=True):
            around = segment_at[call.thread](call.begin_ms) if call.thread in segment_at else None
            part = around.part if around else OTHER
            # DDP issues its all-reduce in nodes of the backward pass
            is_gradient = call.name == "c10d::allreduce_" and part == DENSE_BACKWARD
            part = ALL_REDUCE if is_gradient else part
            found.append(Collective(part, call.begin_ms, max(end_ms, call.begin_ms)))
    return sorted(found, key=lambda collective: collective.arrival_ms)


def merged(segments: Iterable[Segment]) -> Iterator[Segment]:
    """Join adjacent segments of one part, without their operators."""
    last: Segment | None = None
    for segment in segments:
        if last and last.part == segment.part and segment.begin_ms - last.end_ms < 1e-6:
            last = replace(last, end_ms=segment.end_ms)
            continue
        if last:
            yield last
        last = Segment(segment.part, segment.begin_ms, segment.end_ms)
    if last:
        yield last
