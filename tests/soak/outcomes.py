"""Compares bit for bit what two runs have left behind."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import torch
from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

from dlrm_sharded.checkpoint.manifest import check_parts, read_manifest
from dlrm_sharded.checkpoint.restore import load_whole

Scalars = dict[tuple[str, int], list[float]]
"""Values by tag and step, in the order in which they were written."""

SAME_VALUES = ("train/loss", "eval/auroc", "eval/normalized_entropy")
"""Tags whose values do not depend on time."""

DIFFERENT_TENSORS = (".python", ".step_ms")
"""Ends of the names of tensors that differ between equal runs: other users of Python's random
numbers, and times."""


def event_faults(run_dir: Path, reference_dir: Path) -> list[str]:
    """Return what is wrong with the events of a run: other steps, or other values."""
    files = sorted(run_dir.glob("events.out.tfevents.*"))
    if len(files) != 1:
        return [f"{len(files)} event files"]
    mine, expected = scalars(run_dir), scalars(reference_dir)
    faults = []
    for name, difference in (
        ("doubled or unexpected", _counts(mine) - _counts(expected)),
        ("missing", _counts(expected) - _counts(mine)),
    ):
        if difference:
            shown = ", ".join(f"{tag} at {step}" for tag, step in list(difference)[:3])
            faults.append(f"{difference.total()} {name} values: {shown}")
    for key, values in expected.items():
        if key[0] in SAME_VALUES and mine.get(key, values) != values:
            faults.append(f"{key[0]} at {key[1]} is {mine[key]} instead of {values}")
    return faults


def scalars(run_dir: Path) -> Scalars:
    """Return all scalars of a run."""
    found: Scalars = {}
    # The loader that is not legacy makes tensors of scalars.
    for path in sorted(run_dir.glob("events.out.tfevents.*")):
        for event in LegacyEventFileLoader(str(path)).Load():
            for value in event.summary.value:
                if value.HasField("simple_value"):
                    found.setdefault((value.tag, event.step), []).append(value.simple_value)
    return found


def checkpoint_faults(folder: Path, reference: Path) -> list[str]:
    """Return which tensors of a checkpoint are not, bit for bit, those of another one."""
    mine, expected = read_manifest(folder), read_manifest(reference)
    check_parts(mine)
    if mine.tensors.keys() != expected.tensors.keys():
        names = sorted(mine.tensors.keys() ^ expected.tensors.keys())
        return [f"{len(names)} tensors are in one checkpoint only: {', '.join(names[:3])}"]
    return [
        f"{name} differs"
        for name in expected.tensors
        if not name.endswith(DIFFERENT_TENSORS)
        and not torch.equal(load_whole(mine, name), load_whole(expected, name))
    ]


def _counts(found: Scalars) -> Counter[tuple[str, int]]:
    return Counter({key: len(values) for key, values in found.items()})
