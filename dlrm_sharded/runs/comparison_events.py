"""Write a comparison as a run of its own in TensorBoard."""

from __future__ import annotations

import re
from pathlib import Path

from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.plugins.custom_scalar import layout_pb2, metadata

from dlrm_sharded.plans.plan_cost import STAGES
from dlrm_sharded.runs.comparison import Comparison
from dlrm_sharded.runs.comparison_figures import comparison_figures
from dlrm_sharded.runs.comparison_text import comparison_markdown
from dlrm_sharded.runs.event_file import EventFile
from dlrm_sharded.runs.run_events import THROUGHPUT, hparams_config

EVENT_FILE_SUFFIX = ".comparison"
MAX_NAME = 100
"""Length from which on the name of a picture is cut."""

WRITTEN = f"events.out.tfevents.*{EVENT_FILE_SUFFIX}", "comparison.*.png", "cost_by_rank.*.png"
"""Patterns of the files that a later comparison replaces."""

CHARTS = {
    "embedding": (
        "embedding/cost_ms",
        "embedding/critical_path_ms",
        "embedding/input_dist_ms",
        "embedding/imbalance",
        *(f"embedding/{stage}_ms/max" for stage in STAGES),
    ),
    "planning and training": ("plan/solve_s", THROUGHPUT, "eval/auroc"),
}
"""Tags of scalars by category; each gets a chart of all runs."""


def write_comparison(comparison: Comparison, folder: Path) -> None:
    """Write the event file and pictures of a comparison in place of earlier ones."""
    for pattern in WRITTEN:
        for old in folder.glob(pattern):
            old.unlink()
    with EventFile(folder, suffix=EVENT_FILE_SUFFIX) as file:
        file.text("comparison/summary", comparison_markdown(comparison))
        for number, (tag, figure) in enumerate(comparison_figures(comparison).items()):
            file.figure(tag, figure)
            name = tag.replace("/", ".")
            name = name if len(name) <= MAX_NAME else f"{name[:MAX_NAME]}….{number}"
            figure.savefig(folder / f"{name}.png", dpi=150)
        file.summary(_charts())
        file.summary(hparams_config())


def _charts() -> Summary:
    """Return the layout of the custom scalars: a chart of all runs for each tag of CHARTS."""
    layout = layout_pb2.Layout(
        category=[
            layout_pb2.Category(
                title=category,
                chart=[
                    layout_pb2.Chart(
                        title=tag,
                        multiline=layout_pb2.MultilineChartContent(tag=[f"^{re.escape(tag)}$"]),
                    )
                    for tag in tags
                ],
            )
            for category, tags in CHARTS.items()
        ]
    )
    plugin = SummaryMetadata.PluginData(plugin_name=metadata.PLUGIN_NAME)
    value = Summary.Value(
        tag=metadata.CONFIG_SUMMARY_TAG,
        tensor=TensorProto(dtype=DT_STRING, string_val=[layout.SerializeToString()]),
        metadata=SummaryMetadata(plugin_data=plugin),
    )
    return Summary(value=[value])
