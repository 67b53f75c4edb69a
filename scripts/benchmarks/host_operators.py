"""Counts the leaf operators of a training step, by the part of the step that calls them."""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

NUM_STEPS = 3
REGION = re.compile(r"## ([a-z_]\w*)( \d+)? ##")
"""Name of a region that TorchRec's pipelines record, and the number of its batch."""

OTHER_PART = "between"
COMPILED = ("Torch-Compiled Region", "CompiledFunction", "## Call CompiledFxGraph")
"""Beginnings of the names of what runs compiled graphs."""

COPIES = ("aten::copy_", "aten::clone", "aten::_to_copy", "aten::_foreach_copy_")
NO_WORK = (
    *("aten::empty", "aten::new_empty", "aten::resize_", "aten::set_", "aten::detach_"),
    "aten::unflatten_dense_tensors",
)
"""Beginnings of the names of what makes memory or views, which is not in all schemas."""


Counts = dict[str, Counter[str]]
"""By part, the numbers of operators that are `eager`, `copies` among those, and `compiled`."""


def profiled_operators(step: Callable[[], object]) -> dict[str, dict[str, float]]:
    """Profile some steps, and return the mean counts of one, see `count_operators`."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(NUM_STEPS):
            step()
    return {
        part: {kind: number / NUM_STEPS for kind, number in counts.items()}
        for part, counts in count_operators(profiler.events() or ()).items()
    }


def count_operators(events: Iterable[Any]) -> Counts:
    """Count the leaf operators among a profiler's events by part, in the order of the parts.

    A leaf operator computes or moves numbers, and calls no other one that does. Views and
    allocations are none.
    """
    events = sorted(events, key=lambda event: event.time_range.start)
    regions = [event for event in events if REGION.fullmatch(event.name)]
    counts: Counts = {}
    for event in events:
        if not is_operator(event.name) or any(map(is_operator, _names_below(event))):
            continue
        of_part = counts.setdefault(_part(event, regions), Counter())
        if any(name.startswith(COMPILED) for name in _names_above(event)):
            of_part["compiled"] += 1
        else:
            of_part["eager"] += 1
            of_part["copies"] += event.name in COPIES
    return counts


@functools.cache
def is_operator(name: str) -> bool:
    """Return whether an event is an operator that computes or moves numbers."""
    namespace, is_named, operator = name.partition("::")
    if not is_named or " " in name or name.startswith(NO_WORK):
        return False
    packet = getattr(getattr(torch.ops, namespace), operator, None)
    if not isinstance(packet, torch._ops.OpOverloadPacket):
        return False
    overload = getattr(packet, packet.overloads()[0])
    aliases = [returned.alias_info for returned in overload._schema.returns]
    return all(alias is None or alias.is_write for alias in aliases)


def _part(event: Any, regions: Iterable[Any]) -> str:
    """Return the innermost region at the time of an event, whose thread may be another one."""
    at = event.time_range.start
    part = OTHER_PART
    for region in regions:
        if region.time_range.start <= at < region.time_range.end:
            part = region.name
    match = REGION.fullmatch(part)
    return match[1] if match else part


def _names_below(event: Any) -> Iterator[str]:
    for child in event.cpu_children:
        yield child.name
        yield from _names_below(child)


def _names_above(event: Any) -> Iterator[str]:
    while (event := event.cpu_parent) is not None:
        yield event.name
