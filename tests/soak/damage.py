"""Damage checkpoints in every way; each is recognized, and the checkpoint before it is used."""

from __future__ import annotations

import argparse
import json
import logging
import os
import pickle
import random
import re
import shutil
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlrm_sharded.checkpoint.folder import SET_ASIDE, checkpoints
from dlrm_sharded.checkpoint.manifest import FILE_NAME, _checksum, check_parts, read_manifest
from dlrm_sharded.files.errors import CheckpointError, UserError
from dlrm_sharded.files.text_table import TextTable
from dlrm_sharded.job.run_folder import RunFolder
from dlrm_sharded.job.start import Start, find_start
from dlrm_sharded.ranks.distributed import Rank, process_group
from tests.soak.folders import folder_of
from tests.soak.outcomes import checkpoint_faults
from tests.soak.training_run import SMALL, TrainingRun

ERROR = re.compile(r"\berror( on rank \d+)?: ")
NUM_STEPS = 30
INTERVAL = 10
WHOLE_RUNS = ("a bit of a part's numbers", "the manifest truncated", "another shape")
"""Damage that is also tried with runs of torchrun."""


def truncate(path: Path, rng: random.Random) -> None:
    os.truncate(path, rng.randrange(1, path.stat().st_size))


def flip(path: Path, rng: random.Random, *, start: int = 0, stop: int | None = None) -> None:
    """Flip a bit at a random place."""
    data = bytearray(path.read_bytes())
    data[rng.randrange(start, len(data) if stop is None else stop)] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def parts(checkpoint: Path) -> list[Path]:
    return sorted(checkpoint.glob("rank-*.safetensors"))


def flip_header(checkpoint: Path, rng: random.Random) -> None:
    part = rng.choice(parts(checkpoint))
    flip(part, rng, stop=8 + int.from_bytes(part.read_bytes()[:8], "little"))


def flip_numbers(checkpoint: Path, rng: random.Random) -> None:
    part = rng.choice(parts(checkpoint))
    flip(part, rng, start=8 + int.from_bytes(part.read_bytes()[:8], "little"))


def replace(path: Path, content: bytes) -> None:
    path.write_bytes(content)


def make_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def swap(checkpoint: Path) -> None:
    first, second = parts(checkpoint)[:2]
    held = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(held)


def from_before(checkpoint: Path, name: str) -> None:
    """Take a file of the checkpoint before."""
    before = checkpoints(checkpoint.parent.parent)[1]
    shutil.copyfile(before / name, checkpoint / name)


def lie(checkpoint: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the manifest, and make its checksum right."""
    path = checkpoint / FILE_NAME
    fields = json.loads(path.read_text())
    del fields["crc32"]
    change(fields)
    path.write_text(json.dumps({**fields, "crc32": _checksum(fields)}))


def lie_about_file(checkpoint: Path, name: str) -> None:
    """Let the manifest take a part from another place."""
    part = parts(checkpoint)[0].name

    def change(fields: dict[str, Any]) -> None:
        fields["files"][name] = fields["files"].pop(part)
        for tensor in fields["tensors"].values():
            tensor["blocks"] = [
                [offsets, sizes, name if file == part else file, key]
                for offsets, sizes, file, key in tensor["blocks"]
            ]

    lie(checkpoint, change)


def lie_about_shape(checkpoint: Path) -> None:
    """Let a table have more rows than were written."""

    def change(fields: dict[str, Any]) -> None:
        tensor = next(t for n, t in fields["tensors"].items() if n.startswith("tables."))
        (last,) = [b for b in tensor["blocks"] if b[0] == max(x[0] for x in tensor["blocks"])]
        tensor["shape"][0] += 7
        last[1][0] += 7

    lie(checkpoint, change)


def lie_about_dtype(checkpoint: Path) -> None:
    def change(fields: dict[str, Any]) -> None:
        next(iter(fields["tensors"].values()))["dtype"] = "float64"

    lie(checkpoint, change)


def pickled_part(checkpoint: Path, *, right_checksum: bool) -> None:
    part, content = parts(checkpoint)[0], pickle.dumps(list(range(1000)))
    part.write_bytes(content)
    if right_checksum:
        entry = [len(content), zlib.crc32(content)]
        lie(checkpoint, lambda fields: fields["files"].update({part.name: entry}))


def make_file(checkpoint: Path) -> None:
    shutil.rmtree(checkpoint)
    checkpoint.write_bytes(b"")


def dangle(path: Path) -> None:
    path.unlink()
    path.symlink_to("/nowhere")


Damage = Callable[[Path, random.Random], object]
FOREIGN = "another run's checkpoint"
DAMAGES: dict[str, Damage] = {
    "a part truncated": lambda c, rng: truncate(rng.choice(parts(c)), rng),
    "a part empty": lambda c, rng: replace(rng.choice(parts(c)), b""),
    "a part longer": lambda c, rng: replace(parts(c)[0], parts(c)[0].read_bytes() + b"\0"),
    "a part missing": lambda c, rng: rng.choice(parts(c)).unlink(),
    "a part is a folder": lambda c, rng: make_folder(parts(c)[0]),
    "a part is a link to nothing": lambda c, rng: dangle(parts(c)[0]),
    "a bit of a part's header": flip_header,
    "a bit of a part's numbers": flip_numbers,
    "two parts swapped": lambda c, rng: swap(c),
    "a part of another step": lambda c, rng: from_before(c, parts(c)[0].name),
    "a pickled object as part": lambda c, rng: pickled_part(c, right_checksum=False),
    "... with the right checksum": lambda c, rng: pickled_part(c, right_checksum=True),
    "the manifest missing": lambda c, rng: (c / FILE_NAME).unlink(),
    "the manifest empty": lambda c, rng: replace(c / FILE_NAME, b""),
    "the manifest truncated": lambda c, rng: truncate(c / FILE_NAME, rng),
    "a bit of the manifest": lambda c, rng: flip(c / FILE_NAME, rng, stop=500),
    "the manifest is a folder": lambda c, rng: make_folder(c / FILE_NAME),
    "the manifest is a list": lambda c, rng: replace(c / FILE_NAME, b"[]"),
    "the manifest of another step": lambda c, rng: from_before(c, FILE_NAME),
    "another format": lambda c, rng: lie(c, lambda fields: fields.update(format=99)),
    "a path with ../": lambda c, rng: lie_about_file(c, f"../{parts(c)[0].name}"),
    "an absolute path": lambda c, rng: lie_about_file(c, "/etc/passwd"),
    "another shape": lambda c, rng: lie_about_shape(c),
    "another dtype": lambda c, rng: lie_about_dtype(c),
    FOREIGN: lambda c, rng: lie(c, lambda fields: fields.update(run="another")),
    "a file as checkpoint": lambda c, rng: make_file(c),
}
"""Each damages the checkpoint in a folder."""


@dataclass(frozen=True, slots=True)
class Found:
    """The outcome of a damaged checkpoint.

    Args:
        warning: warning about it when the run goes on by itself; empty without one.
        used_step: step of the checkpoint that was used instead.
        error: error when the checkpoint is named; empty without one.
    """

    damage: str
    warning: str
    used_step: int
    error: str

    @property
    def faults(self) -> list[str]:
        faults = []
        if f"{NUM_STEPS}" not in self.warning:
            faults.append("there is no warning that names it")
        if self.used_step != NUM_STEPS - INTERVAL:
            faults.append(f"the run goes on at step {self.used_step}")
        if "\n" in self.error or (not self.error and self.damage != FOREIGN):
            faults.append(f"as the named one, its error is {self.error!r}")
        return [f"{self.damage}: {fault}" for fault in faults]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seed", type=int, default=0, help="seed of the places [%(default)s]")
    parser.add_argument("--flips", type=int, default=500, help="flipped bits [%(default)s]")
    parser.add_argument("--folder", type=Path, help="where runs are kept; by default nowhere")


def run(options: argparse.Namespace) -> int:
    rng = random.Random(options.seed)
    with folder_of(options.folder) as folder, process_group() as rank:
        whole = train(folder / "whole")
        found = [damaged(whole, damage, rng, rank) for damage in DAMAGES]
        missed = missed_flips(whole, options.flips, rng)
        faults = [fault for each in found for fault in each.faults]
        for damage in WHOLE_RUNS:
            faults += [f"{damage}, with torchrun: {x}" for x in whole_run_faults(whole, damage)]
    reasons = [each.warning.partition(" is damaged: ")[2] or each.warning for each in found]
    rows = [
        (each.damage, reason.replace(str(folder), ""))
        for each, reason in zip(found, reasons, strict=True)
    ]
    print(TextTable(["damage", "warning or error"], rows).markdown())
    good = sum(not each.faults for each in found)
    print(f"\n{good} of {len(found)} kinds of damage were recognized and passed over")
    print(f"{options.flips - missed} of {options.flips} flipped bits were recognized")
    print(f"{len(WHOLE_RUNS)} kinds were also tried with whole runs")
    for fault in faults:
        print(f"fault: {fault}")
    return 1 if faults or missed else 0


def train(folder: Path) -> Path:
    """Train a run that leaves three checkpoints; return its folder."""
    trained = new_run(folder)
    trained.start()
    try:
        if (code := trained.finish()) != 0:
            raise RuntimeError(f"the run ended with {code}: {trained.output()}")
    finally:
        trained.stop()
    return folder


def new_run(folder: Path, *overrides: str) -> TrainingRun:
    return TrainingRun(
        folder,
        *SMALL,
        *(f"trainer.num_steps={NUM_STEPS}", f"trainer.checkpoint.every_steps={INTERVAL}"),
        *("trainer.checkpoint.keep=3", *overrides),
    )


def damaged(whole: Path, damage: str, rng: random.Random, rank: Rank) -> Found:
    """Damage the last checkpoint of a copy of a run, and let the run go on."""
    with copied(whole) as run_dir:
        checkpoint = checkpoints(run_dir)[0]
        DAMAGES[damage](checkpoint, rng)
        error = ""
        try:
            begin_from(str(checkpoint), run_dir.with_name("new"), rank)
        except UserError as raised:
            error = str(raised)
        with warnings_of_start() as warnings:
            start = begin_from("auto", run_dir, rank)
        return Found(damage, "; ".join(warnings), start.step, error)


def missed_flips(whole: Path, number: int, rng: random.Random) -> int:
    """Flip bits at random places of all files; return how many changed tensors or state unseen."""
    checkpoint = checkpoints(whole)[0]
    before = read_manifest(checkpoint)
    missed = 0
    for _ in range(number):
        path = rng.choice([*parts(checkpoint), checkpoint / FILE_NAME])
        content = path.read_bytes()
        flip(path, rng)
        try:
            manifest = read_manifest(checkpoint)
            check_parts(manifest)
            # JSON may say the same with a bit flipped, such as the last digit of a number.
            missed += path.name != FILE_NAME or manifest != before
        except CheckpointError:
            pass
        path.write_bytes(content)
    return missed


def whole_run_faults(whole: Path, damage: str) -> list[str]:
    """Damage a checkpoint, and let runs of torchrun go on with it; return what is wrong."""
    faults = []
    with copied(whole) as run_dir:
        checkpoint = checkpoints(run_dir)[0]
        DAMAGES[damage](checkpoint, random.Random(0))
        named = new_run(run_dir.with_name("named"), f"resume={checkpoint}")
        goes_on = new_run(run_dir, "resume=auto")
        try:
            named.start()
            goes_on.start()
            named.finish()
            goes_on.finish()
        finally:
            named.stop()
            goes_on.stop()
        errors = [line for line in named.output().splitlines() if ERROR.search(line)]
        if len(errors) != 1 or checkpoint.name not in errors[0]:
            faults.append(f"{len(errors)} errors about the named one: {errors}")
        if named.agent.returncode == 0:
            faults.append(f"the named one was used: {named.output()}")
        if goes_on.agent.returncode != 0 or goes_on.starts()[-1] != NUM_STEPS - INTERVAL:
            return [*faults, f"the run did not go on: {goes_on.starts()}, {goes_on.output()}"]
        if goes_on.output().count("passed over") != 1:
            faults.append(f"there is not one warning: {goes_on.output()}")
        if not (checkpoint.parent / f"{SET_ASIDE}{checkpoint.name}").exists():
            faults.append("the damaged checkpoint is not set aside")
        if "set aside" not in goes_on.output().partition(f"| {NUM_STEPS - INTERVAL}/")[0]:
            faults.append("it is not set aside before the first step")
        # The run has trained to the same step again.
        faults += checkpoint_faults(goes_on.last_checkpoint(), checkpoints(whole)[0])
    return faults


def begin_from(resume: str, run_dir: Path, rank: Rank) -> Start:
    folder = RunFolder(run_dir, lambda: None)
    return find_start(folder, rank, resume=resume, init_from=None, config={})


@contextmanager
def copied(whole: Path) -> Iterator[Path]:
    """Copy a run for the time of the block."""
    with folder_of(None) as folder:
        yield Path(shutil.copytree(whole, folder / "run"))


@contextmanager
def warnings_of_start() -> Iterator[list[str]]:
    """Gather what the package warns of within the block."""
    texts: list[str] = []

    class Gatherer(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            texts.append(record.getMessage())

    package, handler = logging.getLogger("dlrm_sharded"), Gatherer(logging.WARNING)
    package.addHandler(handler)
    before, package.propagate = package.propagate, False
    try:
        yield texts
    finally:
        package.removeHandler(handler)
        package.propagate = before
