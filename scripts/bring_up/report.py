"""Writes what the steps of a bring-up found out on one page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bring_up.advice import advice
from dlrm_sharded.files.json_files import read_json_object, replace_file
from dlrm_sharded.files.text_table import Column, TextTable
from dlrm_sharded.fitting.evaluate import repeatability_text
from studies.runner import Outcome, missing_text

FILE = "report.md"

SWEEP_COLUMNS = {
    "embedding_cost_ms": Column("embedding cost, ms", ".2f"),
    "imbalance": Column("imbalance", ".2f"),
    "prediction_error": Column("predicted against measured", "+.1%"),
    "samples_per_s": Column("samples/s", ",.0f"),
}


def write_report(out: Path, outcomes: Sequence[Outcome]) -> str:
    """Write OUT/report.md and return a line that names it."""
    is_rehearsal = read_json_object(out / "settings.json", noun="settings")["small"]
    replace_file(out / FILE, report_text(outcomes, is_rehearsal=is_rehearsal).encode())
    return f"report: {out / FILE}"


def report_text(outcomes: Sequence[Outcome], *, is_rehearsal: bool) -> str:
    """Return the page for all steps that were run or tried, in Markdown."""
    figures = {outcome.step: outcome.figures for outcome in outcomes}
    sections = (
        ("Hardware", _hardware(figures.get("hardware", {}))),
        ("Tests", _tests(figures.get("tests", {}))),
        ("First hour on the GPU", _gpu(figures.get("gpu", {}))),
        ("Prices", _prices(figures.get("calibrate", {}))),
        ("Policies", _policies(figures.get("policies", {}))),
        ("Sweep", _sweep(figures.get("sweep", {}))),
        ("Benchmark", _benchmark(figures.get("benchmark", {}))),
        ("Time", _times(outcomes)),
        ("What to do next", (f"- {line}" for line in advice(outcomes, is_rehearsal=is_rehearsal))),
    )
    kind = "Rehearsal of a bring-up" if is_rehearsal else "Bring-up"
    lines = [f"# {kind} of {_device(outcomes)}", "", *_verdict(outcomes)]
    for title, section in sections:
        if text := list(section):
            lines += ["", f"## {title}", "", *text]
    return "\n".join(lines) + "\n"


def _device(outcomes: Sequence[Outcome]) -> str:
    return next((outcome.device for outcome in outcomes if outcome.device), "this machine")


def _verdict(outcomes: Sequence[Outcome]) -> Iterator[str]:
    minutes = sum(outcome.seconds or 0.0 for outcome in outcomes) / 60
    num_ok = sum(outcome.status == "ok" for outcome in outcomes)
    yield f"{num_ok} of {len(outcomes)} steps succeeded, in {minutes:.1f} minutes."
    for outcome in outcomes:
        if outcome.status != "ok":
            headline = (f"{name} {text}" for name, text in outcome.headline.items())
            reasons = outcome.failures or outcome.last_lines[-1:] or list(headline)
            yield ""
            yield f"**{outcome.step}: {outcome.status}.** {'; '.join(reasons)}"
            if outcome.missing:
                yield ""
                yield f"Of {outcome.step}, {missing_text(outcome)}."
    known = next((outcome for outcome in outcomes if outcome.versions), None)
    if known is not None:
        yield ""
        versions = ", ".join(f"{name} {text}" for name, text in known.versions.items())
        yield f"Versions: {versions}; commit {(known.commit or 'unknown')[:12]}."


def _hardware(figures: Mapping[str, Any]) -> Iterator[str]:
    if "lines" not in figures:
        return
    yield from (f"- {line}" for line in figures["lines"])
    yield f"- prices without a calibration: {figures.get('prices', 'unknown')}"
    for name, match in figures.get("packaged", {}).items():
        prior = f"a prior, because {'; '.join(match['reasons'])}"
        yield f"- packaged `{name}`: {'made on this hardware' if match['is_same'] else prior}"


def _tests(figures: Mapping[str, Any]) -> Iterator[str]:
    if "passed" in figures:
        yield (
            f"{figures['passed']} tests passed, {figures['failed']} failed and "
            f"{figures['skipped']} were skipped (`pytest {figures['selection']}`)."
        )


def _gpu(figures: Mapping[str, Any]) -> Iterator[str]:
    rows = [
        [name, step["status"], "; ".join(f"{key} {text}" for key, text in step["headline"].items())]
        for name, step in figures.get("steps", {}).items()
    ]
    if rows:
        yield TextTable(["step", "status", "figures"], rows).markdown()


def _prices(figures: Mapping[str, Any]) -> Iterator[str]:
    calibrated, packaged = figures.get("held_out_errors"), figures.get("packaged_errors")
    if calibrated is None or packaged is None:
        return
    num = figures["num_plans"]
    yield (
        f"The cost model was fitted to {num['fitted']} measured plans. The table compares it with "
        f"the packaged prices on {num['held_out']} plans that it did not see; errors are means, in "
        "percent of the measured time."
    )
    yield ""
    columns = ("quantity", Column("packaged, %", ".1f"), Column("calibrated, %", ".1f"))
    rows = [
        [name, *(errors.get(name, {}).get("mape") for errors in (packaged, calibrated))]
        for name in calibrated
    ]
    yield TextTable(columns, rows).markdown()
    if (repeats := repeatability_text(figures["repeatability"])) is not None:
        yield ""
        yield f"No prediction can be expected to do better than measurements repeat: {repeats}."


def _policies(figures: Mapping[str, Any]) -> Iterator[str]:
    for policy, trained in figures.items():
        yield (
            f"- {policy}: on tasks of its validation, plans cost "
            f"{trained['over_best_heuristic']:.3f} times those of the best heuristic "
            f"({trained['best_heuristic']}), as predicted."
        )


def _sweep(figures: Mapping[str, Any]) -> Iterator[str]:
    sharders = figures.get("sharders", {})
    if not sharders:
        return
    prices = {text for row in sharders.values() for text in row["prices"] if text}
    yield (
        f"One training run per sharder on {figures['num_ranks']} ranks. Prices of the plans: "
        f"{' or '.join(sorted(prices)) or 'unknown'}."
    )
    yield ""
    rows = [[name, *(row.get(key) for key in SWEEP_COLUMNS)] for name, row in sharders.items()]
    yield TextTable(["sharder", *SWEEP_COLUMNS.values()], rows).markdown()


def _benchmark(figures: Mapping[str, Any]) -> Iterator[str]:
    keys = ("cost_ms over torchrec", "cost_ms over torchrec, 95 %", "predicted_ms over torchrec")
    measured, intervals, predicted = (figures.get(key, {}) for key in keys)
    if not predicted:
        return
    yield (
        "Embedding cost of the sharders' plans over TorchRec's, mean over tasks "
        f"({figures['tasks']}). Lookups are measured on one core or GPU, exchanges are predicted."
    )
    yield ""
    columns = ("sharder", Column("measured", ".3f"), "95 % interval", Column("predicted", ".3f"))
    rows = [
        (
            name,
            mean,
            " to ".join(f"{end:.3f}" for end in intervals.get(name, ())) or None,
            predicted[name],
        )
        for name, mean in measured.items()
    ]
    yield TextTable(columns, rows).markdown()
    errors = figures.get("errors of the slowest rank's computation")
    if errors:
        yield ""
        yield f"The mean error of the slowest rank's predicted computation is {errors['mape']} %."


def _times(outcomes: Sequence[Outcome]) -> Iterator[str]:
    times = (Column("s", ".0f"), Column("at most, s", ".0f"), Column("load before", ".1f"))
    rows: list[Sequence[object]] = [
        (one.step, one.status, one.seconds, one.limit_s, one.load_average.get("before", [None])[0])
        for one in outcomes
    ]
    rows.append(["all", "", sum(one.seconds or 0.0 for one in outcomes), "", ""])
    yield TextTable(["step", "status", *times], rows).markdown()
