"""The comparison as a run of its own in TensorBoard."""

from __future__ import annotations

import io
import re
import time
from pathlib import Path

from matplotlib.figure import Figure
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.plugins.custom_scalar import layout_pb2, metadata
from tensorboard.plugins.text.summary_v2 import text_pb
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from dlrm_sharded.plan_cost import STAGES
from dlrm_sharded.runs.pictures import pictures
from dlrm_sharded.runs.summary import Comparison
from dlrm_sharded.runs.tags import THROUGHPUT, hparams_config
from dlrm_sharded.runs.text import markdown

SUFFIX = ".comparison"
"""Ends the names of event files that are ours to replace."""

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
"""Scalars of runs, each in a chart of all runs."""


def write_board(comparison: Comparison, folder: Path) -> None:
    """Replace the event file of an earlier comparison; others in the folder stay.

    With TensorBoard's own writer: torch's would take longer to load than all the rest.
    """
    for old in folder.glob(f"events.out.tfevents.*{SUFFIX}"):
        old.unlink()
    writer = EventFileWriter(str(folder), filename_suffix=SUFFIX)
    try:
        # TensorBoard drops from this step on what it has read of the file that was replaced.
        _add(writer, session_log=SessionLog(status=SessionLog.START))
        _add(writer, summary=text_pb("comparison/summary/text_summary", markdown(comparison)))
        for tag, figure in pictures(comparison).items():
            _add(writer, summary=_image(tag, figure))
        _add(writer, summary=_charts())
        _add(writer, summary=hparams_config())
    finally:
        writer.close()


def _add(writer: EventFileWriter, **what: object) -> None:
    writer.add_event(Event(wall_time=time.time(), step=0, **what))


def _image(tag: str, figure: Figure) -> Summary:
    png = io.BytesIO()
    figure.savefig(png, format="png")
    width, height = map(int, figure.bbox.size)
    image = Summary.Image(
        width=width, height=height, colorspace=3, encoded_image_string=png.getvalue()
    )
    return Summary(value=[Summary.Value(tag=tag, image=image)])


def _charts() -> Summary:
    """The layout of the custom scalars: a chart of all runs for each of CHARTS."""
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
