"""The sections of the page on clusters that are not there: by priors, simulated, and published."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from benchmarks.compared import markdown
from full_benchmark.production import PAPER_COST_MS, PAPER_GAIN, throughput_gain
from studies.study import Row


def production_section(rows: Sequence[Row]) -> str:
    if not rows:
        return ""
    costs = {row["sharder"]: row["cost_ms"] for row in rows}
    random_ms, paper_ms = costs.get("random"), PAPER_COST_MS["random"]
    lines = []
    for row in rows:
        sharder, cost_ms = row["sharder"], row["cost_ms"]
        paper = PAPER_COST_MS.get(sharder)
        cells = [sharder, "-" if paper is None else f"{paper:.1f}"]
        cells.append("-" if paper is None else f"{paper_ms / paper:.2f}")
        cells.append("-" if paper is None else f"+{100 * PAPER_GAIN[sharder]:.1f} %")
        if cost_ms is None or random_ms is None:
            cells += [row["error"] or "-", "-", "-", "-"]
        else:
            gain = throughput_gain(cost_ms, random_ms)
            gap = "-" if row["gap"] is None else f"{100 * row['gap']:.0f} %"
            cells += [f"{cost_ms:.2f}", f"{random_ms / cost_ms:.2f}", f"{100 * gain:+.1f} %", gap]
        lines.append(cells)
    header = ["sharder", "paper, ms", "random / it", "throughput over random"]
    header += ["here, ms", "random / it", "throughput over random", "gap to the bound"]
    return "\n\n".join(
        [
            f"## NeuroShard's production table (predicted, {rows[0]['gpu']})",
            f"{rows[0]['num_tables']:,} tables with the statistics of Meta's dlrm_datasets on "
            f"{rows[0]['world_size']} GPUs, priced by the prior of the GPU. The paper's tables are "
            "not public, so its milliseconds are of another model; the ratios are what to compare. "
            "Throughput assumes that the rest of the step is, relative to random's cost, what the "
            "paper's first and last row imply; the paper's other rows differ from that by up to 13 "
            "points.",
            markdown(header, lines),
        ]
    )


def simulated_section(rows: Sequence[Row]) -> str:
    if not rows:
        return ""
    costs = {row["sharder"]: row["cost_ms"] for row in rows}
    random_ms = costs.get("random")
    lines = []
    for row in rows:
        if row["cost_ms"] is None:
            lines.append([row["sharder"], row["error"], "-", "-", "-", "-"])
            continue
        over = "-" if random_ms is None else f"{random_ms / row['cost_ms']:.2f}"
        lines.append(
            [
                row["sharder"],
                f"{row['cost_ms']:.1f}",
                over,
                f"{row['predicted_ms']:.1f}",
                f"{row['simulated_step_ms']:.1f}",
                str(row["num_measured"]),
            ]
        )
    header = ["sharder", "embedding cost, ms", "random / it", "predicted, ms", "step, ms"]
    return "\n\n".join(
        [
            "## The production-like model on CPU ranks (simulated)",
            f"{rows[0]['num_tables']:,} tables on {rows[0]['world_size']} CPU ranks, batch "
            f"{rows[0]['batch_size']:,}, as `dlrm-simulate` simulates them: costly ranks and "
            "a random sample are measured on this machine, the others scaled like the sample, and "
            "exchanges are predicted. CPU lookups cost nearly the sum of their tables, so sharders "
            "differ less than on GPUs." + _rest_of_simulated(rows),
            markdown([*header, "measured ranks"], lines),
        ]
    )


def _rest_of_simulated(rows: Sequence[Row]) -> str:
    """Say how much of the step no plan changes."""
    rest_ms = [row["simulated_step_ms"] - row["cost_ms"] for row in rows if row["cost_ms"]]
    if not rest_ms:
        return ""
    num_tables = rows[0]["num_tables"]
    return (
        f" The rest of the step takes {np.median(rest_ms):,.0f} ms on one core, as the DLRM "
        f"multiplies {num_tables * (num_tables + 1) // 2:,} pairs of features for every sample."
    )


def published_section(rows: Sequence[Row]) -> str:
    if not rows:
        return ""
    logs = [math.log1p(row["error"]) for row in rows]
    errors = [abs(value) for value in logs]
    lines = [
        [
            f"{row['num_gpus']} {row['gpu']}",
            f"{row['batch_size']:,}",
            f"{row['published_ms']:.2f}",
            f"{row['predicted_ms']:.2f}",
            f"{100 * row['error']:+.0f}",
            *(f"{row[key]:.2f}" for key in ("dense_ms", "lookups_ms", "exchanges_ms")),
        ]
        for row in rows
    ]
    header = ["GPUs", "batch", "published, ms", "predicted", "error, %"]
    return "\n\n".join(
        [
            "## MLPerf's published steps (predicted)",
            "Steps of MLPerf Training's DLRM-DCNv2 with HugeCTR, from the result logs, beside what "
            "the priors of the GPUs predict. The mean error is "
            f"{100 * math.expm1(float(np.mean(errors))):.0f} %, the largest "
            f"{100 * max(abs(row['error']) for row in rows):.0f} %. The share of the peak that "
            "dense layers reach was chosen for 8 H100; nothing else was fitted to these steps.",
            markdown([*header, "dense", "lookups", "exchanges"], lines),
        ]
    )
