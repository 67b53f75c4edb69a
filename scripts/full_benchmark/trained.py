"""Training under the plans of several sharders on real ranks, in turns, with several seeds."""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

from full_benchmark.sizes import FULL, SMALL, TRAINED_SHARDERS, Sizes
from studies.processes import SCRIPTS, run_python
from studies.study import Case, Row, StudyRun

WIDTH = 32
"""Width of the dense layers, so that most of a step on a CPU is the embeddings'."""

NUM_RANKS, NUM_STEPS, NUM_ROUNDS = 2, 4, 5


def run(study: StudyRun) -> None:
    study.rows(_cases(SMALL if study.small else FULL), "measured")


def _cases(sizes: Sizes) -> Iterator[Case]:
    for number in range(sizes.trained):
        for seed in sizes.seeds:
            run = functools.partial(_run, number, seed)
            yield Case(f"{number}/seed {seed}", run)


def _run(number: int, seed: int) -> list[Row]:
    """Train in a job of its own; its ranks end with it."""
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder) / "rows.jsonl"
        run_python(
            *(str(SCRIPTS / "benchmark.py"), "steps", "--ranks", str(NUM_RANKS)),
            *("--first", str(number), "--cases", "1", "--seed", str(seed)),
            *("--steps", str(NUM_STEPS), "--rounds", str(NUM_ROUNDS), "--jsonl", str(rows)),
            *("--widths", str(WIDTH), "--sharders", *TRAINED_SHARDERS),
        )
        plans = [json.loads(line) for line in rows.read_text().splitlines()]
    return [
        {"seed": seed, "sharder": sharder} | {k: v for k, v in plan.items() if k != "sharders"}
        for plan in plans
        for sharder in plan["sharders"]
    ]
