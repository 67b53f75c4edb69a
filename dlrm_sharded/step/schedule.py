"""The operations of a training step, in the order and with the overlap of the pipeline.

The order is that of `Dlrm.forward` and of autograd, which begins with what was computed last: the
bottom layers run forward while pooled vectors are exchanged, and backward while their gradients
are. DDP reduces the gradients of the dense part when the last one of its bucket is there.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from dlrm_sharded.plans.plan_cost import BACKWARD_STAGES, FORWARD_STAGES, INPUT_DIST, PlanCost
from dlrm_sharded.step.parts import (
    ALL_REDUCE,
    DATA,
    DENSE_BACKWARD,
    DENSE_FORWARD,
    EXCHANGES,
    OPTIMIZER,
    OTHER,
    DenseTimes,
)
from dlrm_sharded.step.timeline import COMPUTE, EXCHANGE, READER, Operation, Times


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """The operations of a step that run at the same time.

    Args:
        exchanges: whether ranks compute while they exchange; not on a CPU whose cores all compute.
        next_ids: whether the ids of a step are redistributed during the step before.
        reads_ahead: whether a thread reads the next batches.
        next_lookup: see `Pipeline`. Computations never overlap: what is gained is that vectors are
            exchanged beside more of them.
    """

    exchanges: bool
    next_ids: bool
    reads_ahead: bool
    next_lookup: str | None = None


SERIAL = Overlap(exchanges=False, next_ids=False, reads_ahead=False)
"""One thing after the other, as on a CPU."""

PIPELINED = Overlap(exchanges=True, next_ids=True, reads_ahead=True)
"""TorchRec's TrainPipelineSparseDist on GPUs."""


def step_operations(
    cost: PlanCost,
    dense: DenseTimes | Sequence[DenseTimes],
    *,
    all_reduce_ms: float,
    overlap: Overlap,
) -> tuple[Operation, ...]:
    """Return the operations of a step under a plan.

    Args:
        cost: predicted or measured times of the embedding stages on every rank; a redistribution
            of ids that is not known takes no time.
        dense: times of the rest, on every rank or the same ones for all.
        all_reduce_ms: time of the all-reduce of the dense part's gradients.
    """
    num_ranks = len(cost.per_rank)
    by_rank = [dense] * num_ranks if isinstance(dense, DenseTimes) else list(dense)
    exchange = EXCHANGE if overlap.exchanges else COMPUTE
    spread = float(np.mean([times.spread for times in by_rank]))
    input_dist_ms = cost.input_dist_ms or (0.0,) * num_ranks

    def operation(name: str, part: str, times_ms: Times, *after: str) -> Operation:
        op = Operation(name=name, part=part, times_ms=times_ms, after=after)
        if part in EXCHANGES:
            return dataclasses.replace(op, stream=exchange, is_collective=True)
        return dataclasses.replace(op, spread=spread)

    def beside(name: str, part: str, *after: str) -> Operation:
        """Return an operation beside the embeddings, which has one of `DenseTimes`."""
        times_ms = np.array([getattr(times, f"{name}_ms") for times in by_rank])
        return operation(name, part, times_ms, *after)

    def with_stages(first: Operation, stages: Iterable[str]) -> list[Operation]:
        """Let stages follow an operation, one after the other."""
        operations = [first]
        for stage in stages:
            times_ms = np.array([rank.stage_ms(stage) for rank in cost.per_rank])
            after = _last_exchanges(operations) or (operations[-1].name,)
            operations.append(operation(stage, stage, times_ms, *after))
        return operations

    ids = operation(INPUT_DIST, INPUT_DIST, np.array(input_dist_ms), DATA)
    forward = with_stages(ids, FORWARD_STAGES)
    backward = with_stages(beside("top_backward", DENSE_BACKWARD), BACKWARD_STAGES)
    # The bottom layers run beside the last exchange forward, so beside the first one backward.
    begun = 1 + max(place for place, op in enumerate(forward) if op.is_collective)
    returned = 1 + min(place for place, op in enumerate(backward) if op.is_collective)
    operations = [
        beside(DATA, DATA),
        *forward[:begun],
        beside("bottom_forward", DENSE_FORWARD),
        *forward[begun:],
        beside("top_forward", DENSE_FORWARD, *_last_exchanges(forward)),
        *backward[:returned],
        beside("bottom_backward", DENSE_BACKWARD),
        operation(ALL_REDUCE, ALL_REDUCE, np.full(num_ranks, all_reduce_ms), "bottom_backward"),
        *backward[returned:],
        beside(OPTIMIZER, OPTIMIZER, *_last_exchanges(backward), ALL_REDUCE),
        beside(OTHER, OTHER),
    ]
    if overlap.next_lookup is not None:
        operations = _looked_up_before(operations, overlap.next_lookup)
    # A lookup beside the optimizer takes the ids that were redistributed earlier in the same step.
    if overlap.next_ids and overlap.next_lookup != OPTIMIZER:
        operations = [_a_step_later(op, INPUT_DIST) for op in operations]
    if overlap.reads_ahead:
        read, *others = operations
        read = dataclasses.replace(read, stream=READER)
        operations = [read, *(_a_step_later(op, DATA) for op in others)]
    return tuple(operations)


def _last_exchanges(operations: Sequence[Operation]) -> tuple[str, ...]:
    """Return the exchanges after the last computation, which what follows has to await."""
    last = itertools.takewhile(lambda op: op.is_collective, reversed(operations))
    return tuple(op.name for op in last)[::-1]


def _looked_up_before(operations: Sequence[Operation], place: str) -> list[Operation]:
    """Let the lookup and exchange of a step's vectors come before an operation of the last step."""
    moved = [op for op in operations if op.part in FORWARD_STAGES]
    others = [op for op in operations if op.part not in FORWARD_STAGES]
    for op in moved:
        others = [_a_step_later(other, op.name) for other in others]
    index = [op.name for op in others].index(place)
    return [*others[:index], *moved, *others[index:]]


def _a_step_later(op: Operation, source: str) -> Operation:
    """Let an operation that needs another one need that of the step before."""
    if source not in op.after:
        return op
    after = tuple(name for name in op.after if name != source)
    return dataclasses.replace(op, after=after, after_previous=(*op.after_previous, source))
