"""Texts of advice: a table of all candidates, and sentences on which one to take."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence

from dlrm_sharded.explain.step_text import needs_text
from dlrm_sharded.files.text_table import TextTable
from dlrm_sharded.plans.task import GIB
from dlrm_sharded.ranks.workers import Refusal
from dlrm_sharded.simulation.candidates import GROUPS, Candidate
from dlrm_sharded.simulation.choice import Choice
from dlrm_sharded.simulation.scaling import Scaling
from dlrm_sharded.simulation.simulation_text import counted, one_line
from dlrm_sharded.step.parts import PART_LABELS

UNIT_SAMPLES = 1e9
"""Samples that times and prices are of where nobody says how many an epoch has."""

MAX_REASON = 60
"""Characters of a reason in the table."""

NOTHING = "-"

CASE_TITLES = ("hardware", "ranks", "sharder", "batch")

GROUP_LABELS = {
    "lookups": "lookups",
    "exchanges": "exchanges",
    "dense": "dense layers",
    "waiting": "waits for other ranks",
    "host": "waits for the host",
}


def advice_lines(choice: Choice, *, samples: float | None) -> list[str]:
    """Write what the figures are based on, the table, how machines scale, and the advice."""
    scalings = [text for scaling in choice.scalings if (text := scaling_text(scaling))]
    return [
        "predictions; the reading of data is not counted",
        *origin_lines(choice.asked),
        *table_lines(choice.asked, samples=samples),
        *scalings,
        f"advice: {choice_text(choice, samples=samples)}",
    ]


def table_lines(candidates: Sequence[Candidate], *, samples: float | None) -> list[str]:
    """Write all candidates; columns of the case in which all are alike are left out.

    Sharders of one machine and size are sorted by their steps, and those without one are last.
    """
    if _is_one_machine(candidates):
        candidates = sorted(candidates, key=lambda c: c.step_ms if c.is_feasible else math.inf)
    rows = [_cells(candidate, samples) for candidate in candidates]
    alike = [title for title in CASE_TITLES if len({row[title] for row in rows}) == 1]
    if len(alike) == len(CASE_TITLES):
        alike = ["batch"]
    titles = [title for title in max(rows, key=len) if title not in alike]
    table = TextTable(titles, [[row.get(title) for title in titles] for row in rows])
    return table.markdown().splitlines()


def _cells(candidate: Candidate, samples: float | None) -> dict[str, str]:
    """Return the cells of a candidate by their titles; without an outcome it has no figures."""
    case = candidate.case
    case_cells = (case.machine.name, f"{case.num_ranks}", case.sharder, f"{case.batch_size:,}")
    cells = dict(zip(CASE_TITLES, case_cells, strict=True)) | {"fits": fits_text(candidate)}
    if not candidate.is_feasible:
        return cells
    num_samples, unit = (samples, "epoch") if samples else (UNIT_SAMPLES, "10^9 samples")
    cells |= {
        "embeddings, ms": f"{candidate.outcome.planned.cost.cost_ms:.2f}",
        "step, ms": f"{candidate.step_ms:.2f}",
        "samples/s": f"{candidate.samples_per_s:,.0f}",
        "error, %": _percent(candidate.outcome.step.error),
        f"hours per {unit}": f"{candidate.hours(num_samples):.3g}",
    }
    if (price := candidate.price(num_samples)) is not None:
        cells[f"price per {unit}"] = f"{price:,.2f}"
    step = candidate.outcome.step
    groups = [group for group in GROUPS if group != "host" or step.host is not None]
    cells |= {f"{group}, %": _percent(candidate.group_share(group)) for group in groups}
    if step.host is not None:
        cells |= {"GPUs, ms": f"{step.device_ms:.2f}", "host, ms": f"{step.host.ms:.2f}"}
    return cells


def origin_lines(candidates: Sequence[Candidate]) -> list[str]:
    """Say for each machine what its figures are based on."""
    lines = []
    for candidate in {c.case.machine.name: c for c in candidates if c.is_feasible}.values():
        machine, standing = candidate.case.machine, candidate.outcome.planned.report.standing
        topology = candidate.task.topology
        memory, ranks = f"{topology.memory_bytes / GIB:.3g}", counted(topology.world_size, "rank")
        if machine.spec is None:
            text = f"{machine.name} is this machine's CPUs, {memory} GiB of each of {ranks}"
            dense = "measured on this machine, one rank alone"
        else:
            known = "" if machine.name == machine.spec.key else f" is {machine.spec.key}"
            size = "" if machine.spec.memory_gib is None else f" of {machine.spec.memory_gib:g} GiB"
            text = f"{machine.name}{known}, {memory}{size}"
            dense = f"from its data sheet, within about {100 * machine.dense_error:.0f} %"
        prices = "prices of unknown origin" if standing is None else standing.text
        lines.append(f"{text} for tables: predicted by {prices}; dense: {dense}")
    return lines


def choice_text(choice: Choice, *, samples: float | None) -> str:
    """Say which candidate to take, what the runner-up loses, and how sure that is."""
    best = choice.best
    is_rented = best.case.machine.is_gpu and not _is_one_machine(choice.asked)
    error = best.outcome.step.error
    within = "" if error is None else f" within about {100 * error:.0f} %"
    figures = [f"{best.samples_per_s:,.0f} samples/s{within}"]
    num_samples = samples or UNIT_SAMPLES
    figures.append(f"{best.hours(num_samples):.3g} hours")
    if (price := best.price(num_samples)) is not None:
        figures.append(f"a price of {price:,.2f}")
    unit = "epoch" if samples else "billion samples"
    needs = needs_text(best.outcome.step)
    return (
        f"{'rent' if is_rented else 'use'} {_name(choice, best)}: {', '.join(figures[:-1])} and "
        f"{figures[-1]} for one {unit}; {_runner_up_text(choice)}"
        f"{'' if needs is None else f'. Its step is {needs}'}"
    )


def scaling_text(scaling: Scaling) -> str | None:
    """Say where a machine stops to scale, and why; None if it has one size only."""
    if scaling.num_sizes < 2:
        return None
    last, limit = scaling.last, scaling.limit
    name = f"{last.case.machine.name} with sharder={last.case.sharder}"
    most = counted(last.case.num_ranks, "rank")
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
    topology = candidate.task.topology
    num_hosts = topology.world_size // topology.ranks_per_host
    hosts = counted(topology.ranks_per_host, "rank")
    if num_hosts > 1:
        hosts = f"{num_hosts} hosts of {hosts}"
    overrides = [
        f"sharder={candidate.case.sharder}",
        f"batch_size={candidate.case.batch_size}",
        f"topology.memory_gib={topology.memory_bytes / GIB:.4g}",
    ]
    overrides += [
        f"topology.{link}_gb_per_s={bandwidth / 1e9:g}"
        for link in ("intra_host", "inter_host")
        if (bandwidth := getattr(topology, f"{link}_bytes_per_s")) is not None
    ]
    return f"{shlex.join([*overrides, *same_in_run])} ({hosts})"


def fits_text(candidate: Candidate) -> str:
    """Say whether a candidate fits, and if not, why."""
    result = candidate.result
    if not isinstance(result, Refusal):
        cached = result.cached_bytes
        return "yes" if not cached else f"with {cached / GIB:.0f} GiB in host memory"
    if candidate.missing_bytes:
        return f"no: {candidate.missing_bytes / GIB:,.0f} GiB are missing"
    reason = one_line(result.message)
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
    consequence = "any of them will do"
    if any(tied.case.machine != choice.best.case.machine for tied in choice.tied):
        consequence = "the answer depends on the error of the prices"
    elif all(c.outcome.step.bounding_host for c in (choice.best, *choice.tied)):
        consequence = "any of them will do, as the host bounds them all"
    return f"{text}; within the error of the predictions it is tied with {names}: {consequence}"


def _tied_names(choice: Choice) -> str:
    """Name what the best candidate is tied with: the sizes of each machine and sharder."""
    sizes: dict[tuple[str, str], list[int]] = {}
    for tied in choice.tied:
        sizes.setdefault(tied.case.curve, []).append(tied.case.num_ranks)
    texts = []
    for (machine, sharder), of_machine in sizes.items():
        *others, last = (f"{size}" for size in sorted(of_machine))
        sizes_text = f"{', '.join(others)} or {last}" if others else last
        texts.append(_text_of(choice, f"{sizes_text} {machine}", sharder))
    return ", ".join(texts)


def _name(choice: Choice, candidate: Candidate) -> str:
    case = candidate.case
    return _text_of(choice, f"{case.num_ranks} {case.machine.name}", case.sharder)


def _text_of(choice: Choice, ranks: str, sharder: str) -> str:
    """Name a candidate by what distinguishes the candidates: ranks, sharder, or both."""
    if _is_one_machine(choice.asked):
        return f"sharder={sharder}"
    has_one_sharder = len({candidate.case.sharder for candidate in choice.ranking}) == 1
    return ranks if has_one_sharder else f"{ranks} with sharder={sharder}"


def _is_one_machine(candidates: Sequence[Candidate]) -> bool:
    return len({(c.case.machine.name, c.case.num_ranks) for c in candidates}) == 1


def _percent(share: float | None) -> str:
    return NOTHING if share is None else f"{100 * share:.0f}"
