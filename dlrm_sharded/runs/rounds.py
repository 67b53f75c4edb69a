"""rounds.jsonl: what the rounds of a sweep measured of a run, beside the runs it is compared to.

Runs that were measured in the same round shared its hosts and minutes, so their figures are pairs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta

from dlrm_sharded.files.json_forms import read_form
from dlrm_sharded.files.limited import Int
from dlrm_sharded.files.line_file import LineFile
from dlrm_sharded.runs.result import MAX_FIGURE, Load

FILE_NAME = "rounds.jsonl"

Positive = Annotated[float, Meta(gt=0, le=MAX_FIGURE)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """The figures of a run in one round.

    Args:
        round: number of the round, from 0.
        place: how many runs were measured before this one in the round.
        spread: the largest of the stages' interquartile ranges, relative to their medians.
        step_spread: how much longer the slowest tenth of the steps took than the median, relative.
        hosts, began_s, core_wait: see `Surroundings`, of the steps.
        seconds: how long the measurement took, with building the model.
        attempt: 1 if the round was disturbed and this is its repetition, else 0.
    """

    round: Int
    place: Int
    embedding_cost_ms: Positive
    spread: Load
    step_ms: Positive
    step_spread: Load
    samples_per_s: Positive
    hosts: Mapping[str, Load]
    began_s: Load
    core_wait: Load
    seconds: Load
    attempt: Int = 0


def rounds_file(run_dir: Path) -> LineFile:
    """Return the file in the folder of a run; it need not exist."""
    return LineFile(run_dir / FILE_NAME, "round")


def read_rounds(run_dir: Path) -> dict[int, Round]:
    """Return the rounds of a run by number; of one that was measured again, the latest counts."""

    def parse(fields: Mapping[str, Any]) -> Round:
        return read_form(fields, Round, name="a round")

    rounds = rounds_file(run_dir).latest(parse, most=10**6).values()
    return {found.round: found for found in rounds}
