"""Writes the rows and pictures of a benchmark for other tools: parquet, csv, TensorBoard."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import polars as pl
from matplotlib.figure import Figure

from dlrm_sharded.runs.event_file import EventFile
from full_benchmark.analysis import PREDICTED_TIE, compare, figures, sharders_of
from full_benchmark.claims import Rows

REFERENCE = "neuroshard"
TENSORBOARD = "tensorboard"


def write_tables(rows: Rows, folder: Path) -> None:
    """Write all rows as results.parquet, and as results.csv without their lists."""
    every = [row for of_study in rows.values() for row in of_study]
    frame = pl.from_dicts(every, infer_schema_length=None)
    frame.write_parquet(folder / "results.parquet")
    is_list = {name for name, dtype in frame.schema.items() if dtype.is_nested()}
    frame.drop(is_list).write_csv(folder / "results.csv")


def write_board(rows: Rows, drawn: Mapping[str, Figure], text: str, folder: Path) -> None:
    """Write a TensorBoard run with the ratios of every sharder, the pictures and the page."""
    board = folder / TENSORBOARD
    for old in board.glob("events.out.tfevents.*"):
        old.unlink()
    events = EventFile(board)
    for study, key in (("measured", "cost_ms"), ("planned", "cost_ms"), ("trained", "median_ms")):
        found = figures(rows.get(study, []), key)
        for sharder in sharders_of(rows.get(study, [])):
            ratio = compare(found, sharder, REFERENCE, margin=PREDICTED_TIE).ratio
            if not math.isnan(ratio):
                events.scalar(f"benchmark/{study}_over_{REFERENCE}/{sharder}", ratio)
    for name, figure in drawn.items():
        events.figure(f"benchmark/{name}", figure)
    events.text("benchmark/page", text)
    events.close()
