"""Packs what studies found out into one file, as many files are hard to bring back."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

from dlrm_sharded.files.json_files import replace_file

ARCHIVE = "results.tar.gz"

TEXTS = {".json", ".jsonl", ".log", ".md"}
"""Ends of the names of files with figures and logs; traces, costs and runs are larger."""

LEFT_OUT = {"train", "traces", "sweep"}
"""Folders of training runs and of traces, whose figures the steps have in their JSON."""


def write_archive(out: Path) -> Path:
    """Write OUT/results.tar.gz, with all figures and logs below OUT, and return its path."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for path in sorted(out.rglob("*")):
            inside = path.relative_to(out)
            if path.suffix in TEXTS and path.is_file() and not LEFT_OUT & {*inside.parts[:-1]}:
                archive.add(path, Path(out.name) / inside)
    replace_file(out / ARCHIVE, packed.getvalue())
    return out / ARCHIVE
