"""Parts: modules whose rows a command makes by itself, or a study as one of a set.

A part is a module with `BASIS`, `OPTIONS`, `cases(options)` and `report(rows, reference)`. Some
have `summary(rows, reference)`: figures of all rows, and those that a headline shows, as text.
"""

from __future__ import annotations

import argparse
import importlib
import json
import shlex
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from dlrm_sharded.files.errors import ConfigError
from dlrm_sharded.files.json_files import replace_file
from dlrm_sharded.files.line_file import LineFile
from studies.store import Cases
from studies.study import Case, Row, StudyRun

PACKAGE = "benchmarks"
OTHERS = ("part", "jsonl", "from_file", "reference")
"""Options that rows do not depend on."""


def option(default: Any, text: str = "", **others: Any) -> dict[str, Any]:
    """Return what argparse has to know of an option.

    Args:
        default: its value, of which it has the type; a tuple for several values; a type for none.
        others: further arguments of `add_argument`.
    """
    if isinstance(default, type):
        return {"type": default, "help": text, **others}
    if isinstance(default, tuple):
        others = {"nargs": "+", **others}
    kind = type(default[0]) if isinstance(default, tuple) and default else type(default)
    kind = str if kind is tuple else kind
    return {"type": kind, "default": default, "help": f"{text} [%(default)s]", **others}


def part_of(name: str) -> ModuleType:
    return importlib.import_module(f"{PACKAGE}.{name}")


def add_part_arguments(parser: argparse.ArgumentParser, part: ModuleType) -> None:
    """Add the options of a part, and those that all parts have."""
    for name, fields in part.OPTIONS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", **fields)
    parser.add_argument("--reference", help="sharder that the others are compared with")
    parser.add_argument("--jsonl", type=Path, help="file of rows, case by case; goes on")
    parser.add_argument(
        "--from",
        type=Path,
        dest="from_file",
        help="report on the rows of such a file, and run nothing",
    )


def run_part(part: ModuleType, options: argparse.Namespace) -> None:
    """Make the rows of a part, or read them, and print its report.

    Raises:
        ConfigError: `--jsonl` has rows of other settings, or `--reference` is no sharder of them.
    """
    if options.reference and not options.from_file:
        check_reference(options.reference, getattr(options, "sharders", ()))
    print(f"\n{part.report(rows_of(options, part.cases(options)), options.reference)}", flush=True)


def run_commands(study: StudyRun, commands: Iterable[str], *, case_s: float) -> None:
    """Let a study consist of parts with options, and keep their rows, figures and headlines.

    Args:
        commands: name and options of each part; all are of one kind.
        case_s: time that a case takes; without it, a case is left out.
    """
    study.device(or_cpu=True)
    cases: list[Case] = []
    for command in commands:
        name, *arguments = shlex.split(command)
        part, parser = part_of(name), argparse.ArgumentParser()
        add_part_arguments(parser, part)
        options = parser.parse_args(arguments)
        cases += part.cases(options)

    def record(rows: Sequence[Row]) -> None:
        if hasattr(part, "summary"):
            lines = "".join(json.dumps(row) + "\n" for row in rows)
            replace_file(Path(f"{name}.jsonl"), lines.encode())
            figures, headline = part.summary(rows, options.reference)
            for key, value in figures.items():
                study.record(key, value)
            study.show(**headline)

    rows = study.rows(cases, part.BASIS, seconds=case_s, done=record)
    if rows:
        print(part.report(rows, options.reference))


def check_reference(reference: str, sharders: Sequence[str]) -> None:
    if reference not in sharders:
        raise ConfigError(f"--reference is {reference!r}, must be one of {', '.join(sharders)}")


def rows_of(options: argparse.Namespace, cases: Iterable[Case]) -> list[Row]:
    """Return the rows of `--from`, or else those of all cases.

    Each case is in `--jsonl` as soon as it ends, and the same command goes on after a killed one.

    Raises:
        ConfigError: `--jsonl` has rows of other settings.
    """
    if options.from_file:
        return list(_read_rows(options.from_file))
    if not options.jsonl:
        return [row for case in cases for row in case.run()]
    store = Cases(options.jsonl, _settings(options), is_strict=True)
    rows: list[Row] = []
    for case in cases:
        ended = store.finished(case.key)
        if ended is None:
            store.add(case.key, case.run(), [])
            ended = store.ended[case.key]
        rows += ended.figures
    return rows


def _settings(options: argparse.Namespace) -> dict[str, Any]:
    """Return the options that rows depend on, as they are read from a file."""
    settings = {key: value for key, value in vars(options).items() if key not in OTHERS}
    read: dict[str, Any] = json.loads(json.dumps(settings, default=str))
    return read


def _read_rows(path: Path) -> Iterator[Row]:
    """Yield the rows of a file of cases or of rows."""
    for entry in LineFile(path, "row").read(dict).values():
        if "figures" in entry:
            yield from entry["figures"]
        elif not entry.keys() & {"conditions", "planned"}:
            yield entry
