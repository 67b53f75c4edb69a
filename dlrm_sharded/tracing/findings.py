"""Finds what stands out in recorded steps: a rank that others wait for, a slow link, a costly part.

A finding compares with what the run has measured before it trained. The median over the steps
counts, so that a pause in one of them is no finding.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from dlrm_sharded.step.parts import DENSE_BACKWARD, DENSE_FORWARD, EXCHANGES, PARTS
from dlrm_sharded.step.timeline import Times
from dlrm_sharded.tracing.recorded import Lateness, RecordedRank, RecordedSteps

WORTH_A_LINE = 0.05
"""Smallest share of a step that a finding takes."""

EXCESS_FACTORS = {DENSE_FORWARD: 3.0, DENSE_BACKWARD: 3.0} | dict.fromkeys(EXCHANGES, 2.0)
"""How many times as long as expected a part takes, if it stands out. The expected time of dense
layers is that of their matrix products, without activations and interactions."""

LOOKUP_FACTOR = 1.5
"""The same for lookups and updates of tables, which training does as the measurement does."""

OPERATOR_SHARE = 0.5
"""Smallest share of the time too much that one operator must take; many small ones are the cost
of small batches, which the profiler itself increases."""

NUM_OPERATORS = 3
"""Number of costliest operators that are named for a part."""


@dataclass(frozen=True, slots=True)
class Straggler:
    """A rank that the others wait for.

    Args:
        waiting_ms: time per step for which the other ranks wait for it, in their mean.
        exchange: the exchange at which ranks wait for it longest.
        late_with: what it does longer than the others before that; None if not known.
    """

    rank: int
    waiting_ms: float
    exchange: str
    late_with: Lateness | None


@dataclass(frozen=True, slots=True)
class SlowExchange:
    """An exchange that takes longer than expected although all ranks have come to it."""

    part: str
    transfer_ms: float
    expected_ms: float


@dataclass(frozen=True, slots=True)
class Operator:
    """An operator in an average step of one rank.

    Args:
        name: empty for Python between operators.
        module: path of the layer; empty if not known.
    """

    name: str
    module: str
    ms: float


@dataclass(frozen=True, slots=True)
class CostlyPart:
    """A part that takes longer than expected on a rank, and its costliest operators."""

    part: str
    rank: int
    part_ms: float
    expected_ms: float
    operators: tuple[Operator, ...]


@dataclass(frozen=True, slots=True)
class Findings:
    """The findings of a trace, the costliest of each kind first."""

    stragglers: tuple[Straggler, ...]
    slow_exchanges: tuple[SlowExchange, ...]
    costly_parts: tuple[CostlyPart, ...]

    @property
    def is_empty(self) -> bool:
        return not (self.stragglers or self.slow_exchanges or self.costly_parts)


def find(
    steps: RecordedSteps, ranks: Sequence[RecordedRank], expected_ms: Mapping[str, Times]
) -> Findings:
    """Look for what stands out.

    Args:
        expected_ms: [W] for each part whose time is known from a measurement.
    """
    least_ms = WORTH_A_LINE * steps.breakdown.step_ms
    return Findings(
        tuple(_stragglers(steps, least_ms)),
        tuple(
            sorted(
                _slow_exchanges(steps, expected_ms, least_ms),
                key=lambda found: found.expected_ms - found.transfer_ms,
            )
        ),
        tuple(
            sorted(
                _costly_parts(steps, ranks, expected_ms, least_ms),
                key=lambda found: found.expected_ms - found.part_ms,
            )
        ),
    )


def _stragglers(steps: RecordedSteps, least_ms: float) -> Iterator[Straggler]:
    num_ranks = len(steps.pieces)
    causes: dict[int, list[tuple[float, str]]] = {}
    for wait in steps.breakdown.waits:
        causes.setdefault(wait.cause, []).append((wait.caused_ms, wait.operation))
    by_time = sorted(causes.items(), key=lambda item: -sum(ms for ms, _ in item[1]))
    for rank, waits in by_time:
        waiting_ms = sum(ms for ms, _ in waits)  # averaged over all ranks
        if waiting_ms >= least_ms:
            of_others_ms = waiting_ms * num_ranks / (num_ranks - 1)
            _, exchange = max(waits)
            yield Straggler(rank, of_others_ms, exchange, steps.late_with(rank, exchange))


def _slow_exchanges(
    steps: RecordedSteps, expected_ms: Mapping[str, Times], least_ms: float
) -> Iterator[SlowExchange]:
    for part in EXCHANGES:
        if part not in expected_ms:
            continue
        transfer_ms = float(steps.transfer_ms[part].max())
        usual_ms = float(expected_ms[part].max())
        if _stands_out(part, transfer_ms, usual_ms, least_ms):
            yield SlowExchange(part, transfer_ms, usual_ms)


def _costly_parts(
    steps: RecordedSteps,
    ranks: Sequence[RecordedRank],
    expected_ms: Mapping[str, Times],
    least_ms: float,
) -> Iterator[CostlyPart]:
    for part in PARTS:
        if part not in expected_ms or part in EXCHANGES:
            continue
        excess = steps.median_ms[part] - expected_ms[part]
        rank = int(excess.argmax())
        part_ms = float(steps.median_ms[part][rank])
        usual_ms = float(expected_ms[part][rank])
        if not _stands_out(part, part_ms, usual_ms, least_ms):
            continue
        operators = costliest_operators(ranks[rank], part)
        if operators and operators[0].ms >= OPERATOR_SHARE * (part_ms - usual_ms):
            yield CostlyPart(part, rank, part_ms, usual_ms, operators)


def _stands_out(part: str, ms: float, expected_ms: float, least_ms: float) -> bool:
    factor = EXCESS_FACTORS.get(part, LOOKUP_FACTOR)
    return ms > factor * expected_ms and ms - expected_ms >= 2 * least_ms


def costliest_operators(
    rank: RecordedRank, part: str, *, most: int = NUM_OPERATORS
) -> tuple[Operator, ...]:
    """Return the operators of a part that take longest on a rank, by their own time."""
    found = [
        Operator(name, module, ms / len(rank.steps))
        for (of_part, name, module), ms in rank.operators_ms.items()
        if of_part == part
    ]
    return tuple(sorted(found, key=lambda operator: -operator.ms)[:most])
