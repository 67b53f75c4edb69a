"""Writes timelines as trace events, which ui.perfetto.dev and chrome://tracing show.

The format is Chrome's "Trace Event Format": complete events with their begin and length in
microseconds, a process for each rank, and a thread for each stream.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from dlrm_sharded.files.json_files import replaced_file
from dlrm_sharded.step.parts import PART_LABELS, WAITING
from dlrm_sharded.step.timeline import STREAMS, Timeline


@dataclass(frozen=True, slots=True)
class Span:
    """Something that a rank did on one of its streams.

    Args:
        part: what its time counts for; the viewer colours spans by it.
        details: shown when the span is selected.
    """

    rank: int
    stream: str
    name: str
    part: str
    begin_ms: float
    end_ms: float
    details: Mapping[str, Any] = field(default_factory=dict)


def timeline_spans(timeline: Timeline, *, num_steps: int) -> Iterator[Span]:
    """Yield the operations that take time, and the waits before them, in the first steps."""
    for step in range(num_steps):
        for place, op in enumerate(timeline.operations):
            arrival, begin, end = (
                times[step, place]
                for times in (timeline.arrival_ms, timeline.begin_ms, timeline.end_ms)
            )
            last = int(arrival.argmax())
            for rank in range(timeline.world_size):
                if op.is_collective and begin[rank] > arrival[rank]:
                    yield Span(
                        rank,
                        op.stream,
                        f"wait for rank {last}",
                        WAITING,
                        arrival[rank],
                        begin[rank],
                        {"operation": op.name, "cause": last},
                    )
                if end[rank] > begin[rank]:
                    yield Span(
                        rank, op.stream, op.name, op.part, begin[rank], end[rank], {"step": step}
                    )


def write_trace(
    path: Path,
    spans: Iterable[Span],
    *,
    rank_names: Mapping[int, str] | None = None,
    streams: Iterable[str] = STREAMS,
) -> None:
    """Write spans of all ranks as one trace; a path that ends with .gz is compressed.

    Args:
        rank_names: what the viewer calls the ranks; by default "rank 0" and so on.
        streams: streams in the order of their rows.
    """
    threads = {stream: place for place, stream in enumerate(streams)}
    with replaced_file(path) as file:
        if path.suffix == ".gz":  # without a name and a time, equal traces are equal files
            with gzip.GzipFile("", "wb", fileobj=file, mtime=0) as packed:
                _write_events(packed, spans, rank_names or {}, threads)
        else:
            _write_events(file, spans, rank_names or {}, threads)


def _write_events(
    file: IO[bytes] | gzip.GzipFile,
    spans: Iterable[Span],
    rank_names: Mapping[int, str],
    threads: Mapping[str, int],
) -> None:
    file.write(b'{"displayTimeUnit": "ms", "traceEvents": [')
    separator = "\n"
    ranks: set[int] = set()
    for span in spans:
        events = [_event(span, threads[span.stream])]
        if span.rank not in ranks:
            ranks.add(span.rank)
            name = rank_names.get(span.rank, f"rank {span.rank}")
            events = [*_names_of_rank(span.rank, name, threads), *events]
        for event in events:
            file.write(f"{separator}{json.dumps(event)}".encode())
            separator = ",\n"
    file.write(b"\n]}\n")


def _names_of_rank(rank: int, name: str, threads: Mapping[str, int]) -> Iterator[dict[str, Any]]:
    meta = {"ph": "M", "pid": rank}
    yield meta | {"name": "process_name", "args": {"name": name}}
    yield meta | {"name": "process_sort_index", "args": {"sort_index": rank}}
    for stream, thread in threads.items():
        yield meta | {"name": "thread_name", "tid": thread, "args": {"name": stream}}
        yield meta | {"name": "thread_sort_index", "tid": thread, "args": {"sort_index": thread}}


def _event(span: Span, thread: int) -> dict[str, Any]:
    return {
        "name": span.name,
        "cat": PART_LABELS.get(span.part, span.part),
        "ph": "X",
        "pid": span.rank,
        "tid": thread,
        "ts": round(1e3 * span.begin_ms, 3),
        "dur": round(1e3 * (span.end_ms - span.begin_ms), 3),
        "args": dict(span.details),
    }
