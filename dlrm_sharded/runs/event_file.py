"""A TensorBoard event file, written by TensorBoard's own classes.

torch's SummaryWriter takes longer to load than this whole package, and has no public method for
HParams in the run's own file.
"""

from __future__ import annotations

import io
import time
from pathlib import Path
from typing import TYPE_CHECKING

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.text.summary_v2 import text_pb
from tensorboard.summary.writer.event_file_writer import EventFileWriter

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class EventFile:
    """A new event file in a folder; TensorBoard stops showing the earlier files there."""

    def __init__(self, folder: Path, *, suffix: str = "") -> None:
        self._writer = EventFileWriter(str(folder), flush_secs=10, filename_suffix=suffix)
        # From this step on, TensorBoard drops the values of earlier files.
        self._add(session_log=SessionLog(status=SessionLog.START))

    def close(self) -> None:
        self._writer.close()

    def scalar(self, tag: str, value: float, step: int = 0) -> None:
        self._add(step, summary=Summary(value=[Summary.Value(tag=tag, simple_value=value)]))

    def text(self, tag: str, markdown: str) -> None:
        self.summary(text_pb(f"{tag}/text_summary", markdown))

    def figure(self, tag: str, figure: Figure) -> None:
        png = io.BytesIO()
        figure.savefig(png, format="png")
        width, height = map(int, figure.bbox.size)
        image = Summary.Image(
            width=width, height=height, colorspace=3, encoded_image_string=png.getvalue()
        )
        self.summary(Summary(value=[Summary.Value(tag=tag, image=image)]))

    def summary(self, summary: Summary) -> None:
        """Write a summary that a TensorBoard plugin made."""
        self._add(summary=summary)

    def _add(self, step: int = 0, **content: object) -> None:
        self._writer.add_event(Event(wall_time=time.time(), step=step, **content))
