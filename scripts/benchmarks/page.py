"""Writes docs/benchmark.md from the rows of a benchmark, its pictures, and data for other tools."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import polars as pl
from matplotlib.figure import Figure

from benchmarks.claims import claims_table
from benchmarks.figures import costs_of, sharders_of, versus
from dlrm_sharded.files.text_table import TextTable
from dlrm_sharded.runs.event_file import EventFile
from studies.parts import part_of
from studies.study import Row, Study

Rows = Mapping[str, Sequence[Row]]
"""Rows by study."""

REFERENCE = "neuroshard"
PICTURE = "benchmark_{}.png"
OPENING = """# Benchmark

`make benchmark` writes this page and everything on it. A heading says whether its figures were
*measured* on the machine below, *predicted* by a cost model, or *simulated*: measured rank by rank
on one device, with predicted exchanges. Every figure is a fact about this machine; on yours, run
`make calibrate` and then the command. How each figure is made, and more of them, is in
[the measurements](measurements.md)."""
CLOSING = """## Data

Every row is in `results.parquet` and `results.csv` of the benchmark's folder (`benchmark/` by
default), beside the pictures and a TensorBoard run."""


def write_page(
    rows: Rows, studies: Sequence[Study], conditions: Mapping[str, str], docs: Path, out: Path
) -> None:
    """Write the page with its pictures to one folder, and the data to another one."""
    pictures = _pictures(rows)
    text = page(rows, studies, conditions, pictures)
    docs.mkdir(parents=True, exist_ok=True)
    (docs / "benchmark.md").write_text(text)
    for name, figure in pictures.items():
        figure.savefig(docs / PICTURE.format(name), dpi=110)
    _write_tables(rows, out)
    _write_board(rows, pictures, text, out / "tensorboard")


def page(
    rows: Rows,
    studies: Sequence[Study],
    conditions: Mapping[str, str],
    pictures: Mapping[str, Figure],
) -> str:
    """Return the page: a section for each study that has rows."""
    sections = [OPENING, TextTable(["condition", ""], list(conditions.items())).markdown()]
    sections += ["## The papers' claims, and ours", claims_table(rows)]
    for study in studies:
        if not rows.get(study.name):
            continue
        part = part_of(study.commands[0].split()[0])
        sections += [f"## {study.title} ({part.BASIS})", study.about]
        sections.append(part.report(rows[study.name], REFERENCE))
        if study.name in pictures:
            sections.append(f"![{study.title}]({PICTURE.format(study.name)})")
    return "\n\n".join(filter(None, [*sections, CLOSING])) + "\n"


def _pictures(rows: Rows) -> dict[str, Figure]:
    """Return the pictures by name of the study; those without rows are left out."""
    drawn = {}
    for name in ("measured", "production"):
        if rows.get(name):
            drawn[name] = plot_ratios(rows[name])
    if rows.get("scaling"):
        drawn["scaling"] = plot_scaling(rows["scaling"])
    return drawn


def plot_scaling(rows: Sequence[Row]) -> Figure:
    """Draw the time to plan over the numbers of tables and of ranks, on log-log scales."""
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    tables, ranks = figure.subplots(1, 2, sharey=True)
    for axes, key, fixed in (
        (tables, "num_tables", "world_size"),
        (ranks, "world_size", "num_tables"),
    ):
        sizes = [row[fixed] for row in rows]
        usual = max(set(sizes), key=sizes.count)
        for i, sharder in enumerate(sharders_of(rows)):
            found = [row for row in rows if row["sharder"] == sharder and row["cost_ms"]]
            points = sorted((r[key], r["solve_s"]) for r in found if r[fixed] == usual)
            if points:
                axes.loglog(*zip(*points, strict=True), "o-", color=f"C{i}", label=sharder)
        axes.set_xlabel(f"{key}, {fixed} {usual:,}")
        axes.grid(alpha=0.3)
    tables.set_ylabel("seconds to plan")
    tables.legend(frameon=False)
    return figure


def _over_reference(rows: Sequence[Row]) -> dict[str, float]:
    costs = costs_of(rows)
    ratios = {sharder: versus(costs, sharder, REFERENCE).mean for sharder in costs}
    return {sharder: ratio for sharder, ratio in ratios.items() if not math.isnan(ratio)}


def plot_ratios(rows: Sequence[Row]) -> Figure:
    """Draw the mean ratio of every sharder's cost to the reference's as bars."""
    ratios = _over_reference(rows)
    ordered = sorted(ratios, key=lambda sharder: -ratios[sharder])
    figure = Figure(figsize=(7, 0.32 * len(ordered) + 1), layout="constrained")
    axes = figure.subplots()
    bars = axes.barh(ordered, [ratios[sharder] for sharder in ordered], color="#4c78a8")
    axes.bar_label(bars, fmt="%.2f", padding=3)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.margins(x=0.12)
    axes.set_xlabel(f"embedding cost over {REFERENCE}'s")
    return figure


def _write_tables(rows: Rows, folder: Path) -> None:
    """Write all rows as results.parquet, and as results.csv without their lists."""
    nested = ("plan", "predicted", "measured", "rounds_ms", "entry")
    every = [
        {key: value for key, value in row.items() if key not in nested}
        for of_study in rows.values()
        for row in of_study
    ]
    frame = pl.from_dicts(every, infer_schema_length=None)
    frame.write_parquet(folder / "results.parquet")
    is_list = {name for name, dtype in frame.schema.items() if dtype.is_nested()}
    frame.drop(is_list).write_csv(folder / "results.csv")


def _write_board(rows: Rows, pictures: Mapping[str, Figure], text: str, folder: Path) -> None:
    """Write a TensorBoard run with the ratios of every sharder, the pictures and the page."""
    for old in folder.glob("events.out.tfevents.*"):
        old.unlink()
    events = EventFile(folder)
    for study in ("measured", "planned", "production"):
        for sharder, ratio in _over_reference(rows.get(study, [])).items():
            events.scalar(f"benchmark/{study}_over_{REFERENCE}/{sharder}", ratio)
    for name, figure in pictures.items():
        events.figure(f"benchmark/{name}", figure)
    events.text("benchmark/page", text)
    events.close()
