"""The file of a first start: what was measured on some hardware, for later starts there."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlrm_sharded.calibration.ranges import with_ranges_of
from dlrm_sharded.calibration.sample_store import Conditions
from dlrm_sharded.calibration.samples import Sample, sound_sample
from dlrm_sharded.cost.learned import LearnedCostModel
from dlrm_sharded.files.errors import UserError
from dlrm_sharded.files.json_files import read_json_object, write_json
from dlrm_sharded.files.json_forms import read_form
from dlrm_sharded.files.limited import NonNegative
from dlrm_sharded.files.user_cache import user_cache
from dlrm_sharded.hardware.context import RunContext
from dlrm_sharded.plans.standing import Standing

START_FORMAT = 1
FOLDER = "first_starts"


@dataclass(frozen=True, slots=True)
class FirstStart:
    """The measurements of a first start, and how good the prices are that follow from them.

    Args:
        conditions: those that runs must share for it to tell of them.
        samples: measured plans, at least one.
        seconds: time that this took.
        error: error of the fitted prices on plans that were left out.
        rank_error: see `rank_errors`, likewise; None if it is not known.
        disturbance: other work that ran beside the measurements; None if there was little.
    """

    conditions: Conditions
    samples: tuple[Sample, ...]
    seconds: float
    error: float
    rank_error: float | None = None
    disturbance: str | None = None

    @property
    def has_exchanges(self) -> bool:
        return any(sample.world_size > 1 for sample in self.samples)

    def to_json(self) -> dict[str, Any]:
        """Return the content of the file."""
        return {
            "format": START_FORMAT,
            "conditions": dataclasses.asdict(self.conditions),
            "seconds": round(self.seconds, 1),
            "error": round(self.error, 4),
            "rank_error": self.rank_error,
            "disturbance": self.disturbance,
            "samples": [sample.to_row() for sample in self.samples],
        }


@dataclass(frozen=True, slots=True)
class _Form:
    """The file but for its samples, which have a reader of their own."""

    conditions: Conditions
    seconds: NonNegative
    error: NonNegative
    samples: list[dict[str, Any]]
    rank_error: NonNegative | None = None
    disturbance: str | None = None
    format: int = START_FORMAT


def start_path(folder: Path, context: RunContext, *, ranks_per_host: int | None = None) -> Path:
    """Return the file of a run's hardware, optimizer and ranks of a host in a folder."""
    assert context.hardware is not None
    assert context.hardware.fingerprint is not None
    ranks = ranks_per_host or context.ranks_per_host
    return context.hardware.fingerprint.path_in(folder, f"-{context.optimizer}-{ranks}.json")


def start_folder() -> Path:
    """Return the folder of first starts in the user's cache."""
    return user_cache() / FOLDER


def write_start(path: Path, start: FirstStart) -> Path:
    """Write the file, whole or not at all, and return its path.

    Raises:
        OSError, ConfigError: it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, start.to_json())
    return path


def find_start(
    context: RunContext, folders: Sequence[Path], *, may_lack_exchanges: bool = True
) -> FirstStart | None:
    """Return what a first start measured on a run's hardware, in the first folder that has it.

    Args:
        may_lack_exchanges: whether lookups that a single rank measured do, too.
    """
    known = context.hardware is not None and context.hardware.fingerprint is not None
    if not known or context.optimizer is None or context.ranks_per_host is None:
        return None
    for ranks in (context.ranks_per_host, *([1] if may_lack_exchanges else [])):
        for folder in folders:
            found = _read(start_path(folder, context, ranks_per_host=ranks))
            conditions = Conditions(context.optimizer, ranks, context.fbgemm, context.device)
            if found is not None and conditions.allow(found.conditions):
                return found
    return None


def _read(path: Path) -> FirstStart | None:
    """Read a file; None if there is none, or none that can be read, so that it is made again."""
    try:
        form = read_form(read_json_object(path, noun="first start"), _Form, name=str(path))
        if form.format != START_FORMAT or not form.samples:
            return None
        samples = tuple(sound_sample(row) for row in form.samples)
    except UserError:
        return None
    return FirstStart(
        form.conditions, samples, form.seconds, form.error, form.rank_error, form.disturbance
    )


def start_digest(start: FirstStart) -> str:
    """Return a short hash of what was measured."""
    return hashlib.sha256(repr(start).encode()).hexdigest()[:16]


def with_start(prior: LearnedCostModel, start: FirstStart, *, num_ranks: int) -> LearnedCostModel:
    """Return a prior that is adapted to what a first start measured.

    Args:
        num_ranks: ranks of a host of the run; more than one exchange.
    """
    from dlrm_sharded.calibration.factor_fit import (
        fit_factors,
    )  # loads SciPy, which takes half a second

    standing = prior.standing or Standing("prior", prior.name)
    lacks_exchanges = num_ranks > 1 and not start.has_exchanges
    reasons = ["adapted to this hardware"]
    if lacks_exchanges:
        reasons.append("exchanges were not measured")
    if start.disturbance is not None:
        reasons.append(f"beside other work: {start.disturbance}")
    return dataclasses.replace(
        with_ranges_of(fit_factors(prior, start.samples).applied(prior), start.samples),
        correction=None,
        standing=Standing(
            "measured",
            standing.hardware,
            tuple(reasons),
            error=None if lacks_exchanges else start.error,
            rank_error=start.rank_error,
            measured_s=start.seconds,
        ),
    )
