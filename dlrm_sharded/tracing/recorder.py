"""Records what this rank does in some steps, with torch.profiler.

Most parts have names that TorchRec and autograd give their work. The recorder adds those of
lookups, of their exchange and of layers, with hooks that exist only while it records.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from dlrm_sharded.model.sharded_model import sharded_embeddings
from dlrm_sharded.plans.plan_cost import FWD_COMM, FWD_COMPUTE, INPUT_DIST
from dlrm_sharded.step.parts import OTHER, PARTS
from dlrm_sharded.tracing.kernels import (
    device_collectives,
    device_segments,
    device_steps,
    kernel_segments,
)
from dlrm_sharded.tracing.perfetto import Span
from dlrm_sharded.tracing.recorded import RecordedRank, operator_times
from dlrm_sharded.tracing.regions import (
    MODULE_PREFIX,
    STAGE_PREFIX,
    Event,
    SegmentAt,
    host_collectives,
    is_operator,
    merged,
    modules_by_sequence,
    thread_segments,
    with_all_reduce,
)

log = logging.getLogger(__name__)

STEP_REGION = "dlrm_sharded step"
ANCHOR = "dlrm_sharded anchor"

SHORTEST_OPERATOR_MS = 0.02
"""Operators that are shorter are not in the trace; their time counts all the same."""

WRAPPERS = ("_dmp_wrapped_module.", "module.", "_orig_mod.")


class TraceRecorder:
    """Records steps between `start` and `stop`; the first one is left out, as it may be slower.

    Args:
        model: sharded model; its layers get hooks between `start` and `stop`.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._model = model
        self._on_cuda = device.type == "cuda"
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._on_cuda else [])]
        self._profile = profile(activities=activities)
        self._stack = ExitStack()
        self.anchor_ns = 0
        """Time of this host's clock at which the record has its zero."""

    def start(self) -> None:
        for name, part in (("_lookups", FWD_COMPUTE), ("_output_dists", FWD_COMM)):
            for module in getattr(sharded_embeddings(self._model), name):
                self._record_calls(module, f"{STAGE_PREFIX}{part}")
        self._record_input_dist()
        for path, layer in _layers(self._model):
            self._record_calls(layer, f"{MODULE_PREFIX}{path}")
        self._profile.start()
        self._stack.callback(self._profile.stop)
        with record_function(ANCHOR):
            self.anchor_ns = time.time_ns()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Record a step."""
        with record_function(STEP_REGION):
            yield

    def stop(self) -> None:
        """Stop recording and remove all hooks; does nothing the second time."""
        if self._on_cuda:
            torch.cuda.synchronize()
        self._stack.close()

    def record(self) -> RecordedRank:
        """Return what was recorded, in ms since the anchor."""
        events = self._events()
        if self._on_cuda and all(event.stream is None for event in events):
            log.warning("the profiler has seen no kernels; the trace shows the host's time")
        return reduce_events(events)

    def _record_input_dist(self) -> None:
        """Record the method that begins the redistribution of ids, which is no module's call."""
        embeddings = sharded_embeddings(self._model)
        begin = embeddings.input_dist

        def recorded(*inputs: Any, **options: Any) -> Any:
            with record_function(f"{STAGE_PREFIX}{INPUT_DIST}"):
                return begin(*inputs, **options)

        embeddings.input_dist = recorded  # hides the class's method on this instance
        self._stack.callback(delattr, embeddings, "input_dist")

    def _record_calls(self, module: nn.Module, name: str) -> None:
        calls: list[record_function] = []

        def enter(module: nn.Module, inputs: Any) -> None:
            calls.append(record_function(name))
            calls[-1].__enter__()

        def leave(module: nn.Module, inputs: Any, output: Any) -> None:
            if calls:
                calls.pop().__exit__(None, None, None)

        # the region begins before the module's own hooks, and ends after them
        before = module.register_forward_pre_hook(enter, prepend=True)
        after = module.register_forward_hook(leave, always_call=True)
        self._stack.callback(before.remove)
        self._stack.callback(after.remove)

    def _events(self) -> list[Event]:
        """Return the events of the profiler, in ms since the anchor."""
        profiler: Any = self._profile.profiler
        raw = profiler.kineto_results.events()
        anchor, *_ = [event for event in raw if event.name() == ANCHOR]
        zero_ns = anchor.start_ns() + anchor.duration_ns() // 2

        def ms(time_ns: int) -> float:
            return (time_ns - zero_ns) / 1e6

        # kernels, and the calls of CUDA that launch them, are linked to operators and regions
        launches = {
            event.correlation_id(): (event.start_thread_id(), ms(event.start_ns()))
            for event in raw
            if event.linked_correlation_id() == 0
        }
        events = []
        for event in raw:
            on_device = event.device_type() != DeviceType.CPU
            linked = event.linked_correlation_id()
            if event.is_hidden_event() or (event.is_user_annotation() if on_device else linked > 0):
                continue
            events.append(
                Event(
                    event.name(),
                    ms(event.start_ns()),
                    ms(event.start_ns() + event.duration_ns()),
                    thread=event.start_thread_id(),
                    sequence=event.sequence_nr(),
                    stream=event.device_resource_id() if on_device else None,
                    launch=launches.get(linked) if on_device else None,
                )
            )
        return events


def _layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the layers of the dense part, with their paths in the user's model.

    Compiled layers are left out: hooks would let torch compile them once more.
    """
    compiled = {id(m) for m in model.modules() if m._compiled_call_impl is not None}
    skipped = {id(m) for top in model.modules() if id(top) in compiled for m in top.modules()}
    skipped |= {id(module) for module in sharded_embeddings(model).modules()}
    for name, module in model.named_modules():
        for wrapper in WRAPPERS:
            name = name.removeprefix(wrapper)
        # a wrapper has the name "module" and the like
        if name and f"{name}." not in WRAPPERS and id(module) not in skipped:
            yield name, module


def reduce_events(events: list[Event]) -> RecordedRank:
    """Turn a profiler's events into segments, exchanges and sums.

    The main thread is that of the steps. With kernels among the events, the device's time counts.
    """
    regions = sorted(
        (event for event in events if event.name == STEP_REGION), key=lambda event: event.begin_ms
    )
    main_thread = regions[0].thread
    host = [e for e in events if e.stream is None and not e.name.startswith("gloo:")]
    threads = {event.thread for event in host}
    by_thread = {thread: [e for e in host if e.thread == thread] for thread in threads}
    modules = modules_by_sequence(by_thread[main_thread])
    segments = {t: thread_segments(of_thread, modules) for t, of_thread in by_thread.items()}
    segment_at = {thread: SegmentAt(found) for thread, found in segments.items()}
    host_steps = tuple((region.begin_ms, region.end_ms) for region in regions)
    kernels = kernel_segments((e for e in events if e.stream is not None), segment_at)
    if kernels:
        steps = tuple(device_steps(kernels, host_steps))
        mine = device_segments(kernels, segments[main_thread])
        collectives = device_collectives(kernels)
        details = [
            Span(0, f"stream {k.stream}", k.name, s.part, k.begin_ms, k.end_ms) for s, k in kernels
        ]
    else:
        steps = host_steps[1:]
        mine = with_all_reduce(segments[main_thread], by_thread[main_thread])
        collectives = host_collectives(events, segment_at)
        details = []
    details += [_operator_span(event, segment_at[event.thread]) for event in _long(host)]
    since, until = steps[0][0], steps[-1][1]
    return RecordedRank(
        steps=steps,
        segments=tuple(s for s in merged(mine) if s.end_ms > since and s.begin_ms < until),
        collectives=tuple(collectives),
        operators_ms=operator_times(mine, steps),
        details=tuple(s for s in details if s.end_ms > since and s.begin_ms < until),
    )


def _long(events: list[Event]) -> Iterator[Event]:
    for event in events:
        is_shown = is_operator(event.name) or event.name.startswith((MODULE_PREFIX, "##"))
        if is_shown and event.end_ms - event.begin_ms >= SHORTEST_OPERATOR_MS:
            yield event


def _operator_span(event: Event, segment_at: Callable[[float], Any]) -> Span:
    inside = segment_at(event.begin_ms)
    part = inside.part if inside and inside.part in PARTS else OTHER
    name = event.name.strip("# ")
    return Span(0, f"thread {event.thread}", name, part, event.begin_ms, event.end_ms)
