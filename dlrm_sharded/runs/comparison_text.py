"""Writes a comparison as Markdown for files and TensorBoard, and as a short table for terminals."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import polars as pl

from dlrm_sharded.files.text_table import Column, TextTable, listed, quantity, span
from dlrm_sharded.plans.cost_provenance import EXTRAPOLATED
from dlrm_sharded.plans.plan_cost import STAGES
from dlrm_sharded.runs.comparison import PREDICTION_ERROR, SOURCES, Comparison, Row, without_common
from dlrm_sharded.runs.rounds import disturbance_text, read_rounds
from dlrm_sharded.runs.run_folder import SUCCEEDED

MEANS = {
    "embedding cost, ms": ("embedding_cost_ms", ",.2f"),
    "imbalance": ("imbalance", ",.2f"),
    "gap": ("gap", ",.1%"),
    "planning, s": ("plan_solve_s", ",.3f"),
    "samples/s": ("samples_per_s", ",.0f"),
    "time / random's [95 %]": ("time_over_random", ""),
    "time / fastest's [95 %]": ("time_over_fastest", ""),
    "cost / fastest's [95 %]": ("cost_over_fastest", ""),
}
STAGE_MEANS = {
    "critical path, ms": ("critical_path_ms", ",.2f"),
    **{stage.replace("_", " "): (f"{stage}_ms", ",.2f") for stage in STAGES},
    "input dist": ("input_dist_ms", ",.2f"),
    "prediction": (PREDICTION_ERROR, "+,.1%"),
}
"""Figures and the formats of their means, by column title; the format of a ratio is empty."""

ABOUT_MEANS = """\
Figures are means over the runs that succeeded, ± their standard deviation (n - 1). With rounds, a
run's embedding cost and throughput are means over undisturbed rounds; the rest is from its
training. A ratio divides time per sample (1 / throughput) or embedding cost by that of random or
the fastest: above 1 is worse. The 95 % intervals are from pairs of runs with the same seed and
round; runs with the same plan count as one. Gap: predicted cost over the lower bound, minus 1."""
ABOUT_STAGES = """\
Times are in ms, from the training; those of stages are maxima over ranks. The critical path is the
sum of the stages; input dist, the redistribution of ids, precedes them. The embedding cost is their
sum on the slowest rank. Prediction is the predicted over the measured embedding cost, minus 1."""


def comparison_markdown(comparison: Comparison) -> str:
    """Write the conditions, the figures and the failures of a comparison.

    There are two narrow tables, because TensorBoard breaks words to fit a wide one.
    """
    failures = _failures(comparison)
    parts = [
        listed(_about(comparison)),
        _table(comparison, MEANS).markdown(),
        ABOUT_MEANS,
        listed(comparison.conclusions),
        "In no mean, as they did not succeed:" if failures else "",
        listed(failures),
        _table(comparison, STAGE_MEANS).markdown(),
        ABOUT_STAGES,
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


def short_table(comparison: Comparison) -> str:
    """Return the main figures and every failure, for a terminal."""
    means = {title: MEANS[title] for title in MEANS if title not in ("gap", "planning, s")}
    table = _table(comparison, means)
    return "\n".join([table.text(), *_failures(comparison), *comparison.conclusions])


def _table(comparison: Comparison, means: Mapping[str, tuple[str, str]]) -> TextTable:
    """Return a table with a row for each group, and the columns of which any row has a value.

    Args:
        means: see `MEANS`.
    """
    rows = comparison.rows
    hidden = () if _has_one_cost_model(comparison) else ("gap", "prediction")
    cells = {
        title: [_cell(row, *mean) for row in rows]
        for title, mean in means.items()
        if title not in hidden
    }
    cells = {title: found for title, found in cells.items() if {*found} - {None, "reference"}}
    cells["runs"] = [f"{row.fields['succeeded']} / {row.fields['runs']}" for row in rows]
    labels = {"sharder": [row.label for row in rows]}
    labels |= {title: [row.conditions[title] for row in rows] for title in rows[0].conditions}
    numbers = [Column(title, align=">") for title in cells]
    return TextTable([*labels, *numbers], list(zip(*labels.values(), *cells.values(), strict=True)))


def _cell(row: Row, figure: str, spec: str) -> str | None:
    if not spec:
        ratio = row.ratios[figure]
        return ratio.text() if ratio else "reference" if row.is_reference(figure) else None
    mean, std, num = row.spread(figure)
    if not num:
        return None
    text = f"{mean:{spec}}"
    if num > 1:
        text += f" ± {std:{spec.removeprefix('+')}}"
    num_all = row.fields["succeeded"]
    return text if num == num_all else f"{text} ({num} of {num_all})"


def _about(comparison: Comparison) -> Iterator[str]:
    """Yield lines that describe the compared runs, and count them by property if they differ."""
    table = comparison.table
    ran = table.filter(pl.col("state") == SUCCEEDED)
    num_seeds = table["seed"].drop_nulls().n_unique()
    yield f"{quantity(table.height, 'run')}, {ran.height} succeeded; {quantity(num_seeds, 'seed')}"
    counted = {
        **{title: table[name] for title, name in {**SOURCES, "versions": "versions"}.items()},
        "commit": ran["commit"].cast(pl.String).str.head(12),
        "batch size": ran["batch_size"],
    }
    for title, values in counted.items():
        yield f"{title}: {_counted(values)}"
    if rounds := list(filter(None, [read_rounds(Path(folder)) for folder in ran["folder"]])):
        yield disturbance_text(rounds)
    elif waits := ran["core_wait"].drop_nulls().to_list():
        yield (
            f"not measured side by side: on {_counted(ran['hosts'])}; others had the cores for "
            f"{span(waits, '.0%')} of a training"
        )
    beyond = ran.filter(pl.col("prices").cast(pl.String).str.contains(EXTRAPOLATED))
    if beyond.height:
        yield f"predictions of {quantity(beyond.height, 'run')} are extrapolated, see train.log"
    if not _has_one_cost_model(comparison):
        yield "cost models: not the same in all, so predictions and bounds are left out"
    if common := without_common(table["setting"].to_list())[0]:
        yield f"the same in all: {common}"


def _has_one_cost_model(comparison: Comparison) -> bool:
    """Return whether all predictions used the same cost model, as far as is known."""
    succeeded = comparison.table.filter(pl.col("state") == SUCCEEDED)
    return succeeded["prices_digest"].n_unique() < 2


def _counted(values: pl.Series) -> str:
    """Return the value of all runs, or each value with its number of runs."""
    counts = values.cast(pl.String).fill_null("unknown").value_counts(sort=True).rows()
    if len(counts) < 2:
        return str(counts[0][0]) if counts else "unknown"
    return "; ".join(f"{value} ({quantity(count, 'run')})" for value, count in counts)


def _failures(comparison: Comparison) -> list[str]:
    """Return a line for each run that did not succeed, and for each file that could not be read."""
    failed = comparison.table.filter(pl.col("state") != SUCCEEDED)
    lines = [
        f"{name}: {state}: {reason or 'no reason known'} ({f'log: {log}' if log else 'no log'})"
        for name, state, reason, log in failed.select("run", "state", "reason", "log").rows()
    ]
    return [" ".join(line.split()) for line in [*lines, *comparison.problems]]
