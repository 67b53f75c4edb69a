"""Texts of advice: a table of all candidates, and sentences on which one to take."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Sequence

from dlrm_sharded.advice.candidates import GROUPS, Candidate, Failure
from dlrm_sharded.advice.choice import Choice
from dlrm_sharded.advice.machines import Machine
from dlrm_sharded.advice.scaling import Scaling
from dlrm_sharded.files.markdown import markdown_table
from dlrm_sharded.plans.task import GIB
from dlrm_sharded.step.parts import PART_LABELS

UNIT_SAMPLES = 1e9
"""Samples that times and prices are of where nobody says how many an epoch has."""

MAX_REASON = 60
"""Characters of a reason in the table."""

NOTHING = "-"

GROUP_LABELS = {
    "lookups": "lookups",
    "exchanges": "exchanges",
    "dense": "dense layers",
    "waiting": "waits for other ranks",
}

Column = tuple[str, Callable[[Candidate], str]]


def table_lines(candidates: Sequence[Candidate], *, samples: float | None) -> list[str]:
    """Write all candidates; columns of the case in which all are alike are left out.

    Sharders of one machine and size are sorted by their steps, and those without one are last.
    """
    if len({(c.case.machine.name, c.case.num_ranks) for c in candidates}) == 1:
        candidates = sorted(
            candidates, key=lambda c: c.outcome.step_ms if c.is_feasible else math.inf
        )
    columns = [*_case_columns(candidates), ("fits", fits_text), *_columns(candidates, samples)]
    titles = [title for title, _ in columns]
    return markdown_table(titles, ([cell(c) for _, cell in columns] for c in candidates))


def origin_lines(candidates: Sequence[Candidate]) -> list[str]:
    """Say for each machine what its figures are based on."""
    lines = []
    by_machine = {c.case.machine.name: c for c in candidates if c.is_feasible}
    for candidate in by_machine.values():
        machine, outcome = candidate.case.machine, candidate.outcome
        prices = "prices of unknown origin" if outcome.standing is None else outcome.standing.text
        dense = "measured on this machine, one rank alone"
        if machine.spec is not None:
            dense = f"from its data sheet, within about {100 * outcome.dense_error:.0f} %"
        lines.append(f"{_machine_text(machine, candidate)}: predicted by {prices}; dense: {dense}")
    return lines


def choice_text(choice: Choice, *, samples: float | None) -> str:
    """Say which candidate to take, what the runner-up loses, and how sure that is."""
    best = choice.best
    verb = "rent" if best.case.machine.is_gpu and not _is_one_machine(choice) else "use"
    figures = [f"{best.samples_per_s:,.0f} samples/s{_error_text(best)}"]
    num_samples = samples or UNIT_SAMPLES
    figures.append(f"{best.hours(num_samples):.3g} hours")
    if (price := best.price(num_samples)) is not None:
        figures.append(f"a price of {price:,.2f}")
    unit = "epoch" if samples else "billion samples"
    text = (
        f"{verb} {_name(choice, best)}: {', '.join(figures[:-1])} and {figures[-1]} for one {unit}"
    )
    return f"{text}; {_runner_up_text(choice)}"


def scaling_text(scaling: Scaling) -> str | None:
    """Say where a machine stops to scale, and why; None if it has one size only."""
    if scaling.num_sizes < 2:
        return None
    last, limit = scaling.last, scaling.limit
    name = f"{last.case.machine.name} with sharder={last.case.sharder}"
    most = _ranks(last.case.num_ranks)
    if limit is None:
        return f"{name} scales up to {most}, the most that were asked for"
    stage = "" if len(GROUPS[limit.group]) == 1 else f" (mostly {PART_LABELS[limit.part]})"
    return (
        f"{name} scales up to {most}: {limit.beyond.case.num_ranks} give "
        f"{100 * limit.gain:.0f} % of the ideal gain, because of the {GROUP_LABELS[limit.group]}"
        f"{stage}, which take {limit.ms:.2f} ms where ideal scaling leaves {limit.ideal_ms:.2f} ms"
    )


def overrides_text(candidate: Candidate, same_in_run: Sequence[str] = ()) -> str:
    """Write the overrides of dlrm-train for a candidate, and the ranks to start.

    Args:
        same_in_run: overrides of the question that a run needs as well, such as `data=t510`.
    """
    assert candidate.task is not None
    topology = candidate.task.topology
    num_hosts = topology.world_size // topology.ranks_per_host
    hosts = f"{num_hosts} hosts of {_ranks(topology.ranks_per_host)}"
    hosts = _ranks(topology.world_size) if num_hosts == 1 else hosts
    overrides = [
        f"sharder={candidate.case.sharder}",
        f"batch_size={candidate.batch_size}",
        f"topology.memory_gib={topology.memory_bytes / GIB:.4g}",
    ]
    overrides += [
        f"topology.{link}_gb_per_s={bandwidth / 1e9:g}"
        for link in ("intra_host", "inter_host")
        if (bandwidth := getattr(topology, f"{link}_bytes_per_s")) is not None
    ]
    return f"{shlex.join([*overrides, *same_in_run])} ({hosts})"


def _case_columns(candidates: Sequence[Candidate]) -> list[Column]:
    columns: list[Column] = [
        ("hardware", lambda c: c.case.machine.name),
        ("ranks", lambda c: f"{c.case.num_ranks}"),
        ("sharder", lambda c: c.case.sharder),
        ("batch", lambda c: f"{c.batch_size:,}"),
    ]
    varying = [column for column in columns if len({column[1](c) for c in candidates}) > 1]
    return varying or columns[:3]


def _columns(candidates: Sequence[Candidate], samples: float | None) -> list[Column]:
    num_samples, unit = (samples, "epoch") if samples else (UNIT_SAMPLES, "10^9 samples")

    def price_text(candidate: Candidate) -> str:
        price = candidate.price(num_samples)
        return NOTHING if price is None else f"{price:,.2f}"

    figures: list[Column] = [
        ("embeddings, ms", lambda c: f"{c.outcome.embedding_ms:.2f}"),
        ("step, ms", lambda c: f"{c.outcome.step_ms:.2f}"),
        ("samples/s", lambda c: f"{c.samples_per_s:,.0f}"),
        ("error, %", lambda c: _percent(c.outcome.error)),
        (f"hours per {unit}", lambda c: f"{c.hours(num_samples):.3g}"),
    ]
    if any(c.case.machine.price is not None for c in candidates):
        figures.append((f"price per {unit}", price_text))
    figures += [(f"{group}, %", _group_cell(group)) for group in GROUPS]
    return [(title, _if_feasible(cell)) for title, cell in figures]


def _group_cell(group: str) -> Callable[[Candidate], str]:
    return lambda candidate: _percent(candidate.group_share(group))


def _if_feasible(cell: Callable[[Candidate], str]) -> Callable[[Candidate], str]:
    return lambda candidate: cell(candidate) if candidate.is_feasible else NOTHING


def fits_text(candidate: Candidate) -> str:
    """Say whether a candidate fits, and if not, why."""
    result = candidate.result
    if not isinstance(result, Failure):
        cached = result.cached_bytes
        return "yes" if not cached else f"with {cached / GIB:.0f} GiB in host memory"
    if result.missing_bytes:
        return f"no: {result.missing_bytes / GIB:,.0f} GiB are missing"
    reason = " ".join(result.reason.split()).replace("|", "/")
    return f"no: {reason if len(reason) <= MAX_REASON else reason[: MAX_REASON - 3] + '...'}"


def _runner_up_text(choice: Choice) -> str:
    other = choice.runner_up
    if other is None and choice.scalings[0].num_sizes > 1:
        return "its other sizes are slower or do not pay off"
    if other is None:
        return "nothing else that was asked for has a plan"
    verb, more, much = {
        "time": ("takes", "longer", "long"),
        "price": ("costs", "more", "much"),
    }[choice.objective]
    loss = choice.loss(other)
    amount = f"{100 * loss:.1f} % {more}" if loss < 1 else f"{1 + loss:.1f} times as {much}"
    text = f"the runner-up, {_name(choice, other)}, {verb} {amount}"
    if not choice.tied:
        return f"{text}, which the errors of the predictions do not explain"
    names = _tied_names(choice)
    is_other = any(tied.case.machine != choice.best.case.machine for tied in choice.tied)
    consequence = (
        "the answer depends on the error of the prices" if is_other else "any of them will do"
    )
    return f"{text}; within the error of the predictions it is tied with {names}: {consequence}"


def _tied_names(choice: Choice) -> str:
    """Name what the best candidate is tied with: the sizes of each machine and sharder."""
    sizes: dict[tuple[str, str], list[int]] = {}
    for tied in choice.tied:
        key = (tied.case.machine.name, tied.case.sharder)
        sizes.setdefault(key, []).append(tied.case.num_ranks)
    texts = []
    for (machine, sharder), of_machine in sizes.items():
        *others, last = (f"{size}" for size in sorted(of_machine))
        sizes_text = f"{', '.join(others)} or {last}" if others else last
        texts.append(_text_of(choice, f"{sizes_text} {machine}", sharder))
    return ", ".join(texts)


def _ranks(number: int) -> str:
    return f"{number} rank{'s' * (number > 1)}"


def _machine_text(machine: Machine, candidate: Candidate) -> str:
    assert candidate.task is not None
    topology = candidate.task.topology
    memory = f"{topology.memory_bytes / GIB:.3g}"
    if machine.spec is None:
        ranks = _ranks(topology.world_size)
        return f"{machine.name} is this machine's CPUs, {memory} GiB of each of {ranks} for tables"
    known = "" if machine.name == machine.spec.key else f" is {machine.spec.key}"
    size = "" if machine.spec.memory_gib is None else f" of {machine.spec.memory_gib:g} GiB"
    return f"{machine.name}{known}, {memory}{size} for tables"


def _name(choice: Choice, candidate: Candidate) -> str:
    case = candidate.case
    return _text_of(choice, f"{case.num_ranks} {case.machine.name}", case.sharder)


def _text_of(choice: Choice, ranks: str, sharder: str) -> str:
    """Name a candidate by what distinguishes the candidates: ranks, sharder, or both."""
    if _is_one_machine(choice):
        return f"sharder={sharder}"
    has_one_sharder = len({candidate.case.sharder for candidate in choice.ranking}) == 1
    return ranks if has_one_sharder else f"{ranks} with sharder={sharder}"


def _is_one_machine(choice: Choice) -> bool:
    return len({(c.case.machine.name, c.case.num_ranks) for c in choice.asked}) == 1


def _error_text(candidate: Candidate) -> str:
    error = candidate.outcome.error
    return "" if error is None else f" within about {100 * error:.0f} %"


def _percent(share: float | None) -> str:
    return NOTHING if share is None else f"{100 * share:.0f}"
