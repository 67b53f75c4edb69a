"""A TensorBoard event file, written in TensorBoard's own format.

torch's SummaryWriter takes longer to load than this whole package, and has no public method for
HParams in the run's own file. TensorBoard's writer cannot go on with a file of an earlier process,
and on a full disk it ends the training.
"""

from __future__ import annotations

import io
import itertools
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Self

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.text.summary_v2 import text_pb
from tensorboard.summary.writer.record_writer import RecordWriter

from dlrm_sharded.files.errors import LostFolderError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


log = logging.getLogger(__name__)

FLUSH_S = 10
_number = itertools.count()


class EventFile:
    """An event file in a folder; TensorBoard stops showing the earlier files there.

    Events are kept in memory until they are written together, every `FLUSH_S` seconds. Those that
    cannot be written are lost, with one warning for all of them.

    Args:
        enabled: false for no file at all, as on other ranks than 0: every method does nothing then.
        going_on: name and size of a file of an earlier process that is cut to this size, and gets
            further events; None for a new file.
        check_owner: called before each write; raises LostFolderError if another job has the folder.
    """

    def __init__(
        self,
        folder: Path,
        *,
        enabled: bool = True,
        suffix: str = "",
        going_on: tuple[str, int] | None = None,
        check_owner: Callable[[], None] = lambda: None,
    ) -> None:
        self._enabled = enabled  # until a write fails: then the end of the file may be cut
        self._lock = threading.RLock()  # a stall is written by another thread
        self._flushed_s = time.monotonic()
        self._check_owner = check_owner
        self._events = io.BytesIO()
        self._records = RecordWriter(self._events)
        number = f"{int(time.time()):010}.{socket.gethostname()}.{os.getpid()}.{next(_number)}"
        name, size = going_on or (f"events.out.tfevents.{number}{suffix}", 0)
        self._path = folder / name
        if not enabled:
            return
        folder.mkdir(parents=True, exist_ok=True)
        with self._path.open("ab") as file:
            goes_on = 0 < size <= os.fstat(file.fileno()).st_size
            file.truncate(size if goes_on else 0)
        if not goes_on:
            self._add(file_version="brain.Event:2")
            # From this step on, TensorBoard drops the values of earlier files.
            self._add(session_log=SessionLog(status=SessionLog.START))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.position()

    def position(self) -> tuple[str, int]:
        """Write all events to disk; return the name of the file and its size in bytes."""
        with self._lock, suppress(FileNotFoundError):  # it was removed, or there is none
            self._flush()
            return self._path.name, self._path.stat().st_size
        return self._path.name, 0

    def scalar(self, tag: str, value: float, step: int = 0) -> None:
        self._add(step, summary=Summary(value=[Summary.Value(tag=tag, simple_value=value)]))

    def text(self, tag: str, markdown: str, step: int = 0) -> None:
        self.summary(text_pb(f"{tag}/text_summary", markdown), step)

    def figure(self, tag: str, figure: Figure, step: int = 0) -> None:
        png = io.BytesIO()
        figure.savefig(png, format="png")
        width, height = map(int, figure.bbox.size)
        image = Summary.Image(
            width=width, height=height, colorspace=3, encoded_image_string=png.getvalue()
        )
        self.summary(Summary(value=[Summary.Value(tag=tag, image=image)]), step)

    def summary(self, summary: Summary, step: int = 0) -> None:
        """Write a summary that a TensorBoard plugin made."""
        self._add(step, summary=summary)

    def _add(self, step: int = 0, **content: object) -> None:
        event = Event(wall_time=time.time(), step=step, **content)
        with self._lock:
            self._records.write(event.SerializeToString())
            if time.monotonic() - self._flushed_s > FLUSH_S:
                self._flush()

    def _flush(self) -> None:
        events = self._events.getvalue()
        self._events.seek(0)
        self._events.truncate()
        self._flushed_s = time.monotonic()
        if not self._enabled:
            return
        try:
            self._check_owner()
            with self._path.open("ab") as file:  # nothing is written over what another job wrote
                file.write(events)
        except (OSError, LostFolderError) as error:
            self._enabled = False
            log.warning(
                "TensorBoard's events of this run are lost from here on: %s: %s",
                self._path,
                getattr(error, "strerror", error),
            )
