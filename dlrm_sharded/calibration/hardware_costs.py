"""The cost picture of a run: the cost model of its hardware, corrected by earlier runs there."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlrm_sharded.calibration.confidence import Confidence, is_disturbed
from dlrm_sharded.calibration.sample_store import Conditions, SampleStore
from dlrm_sharded.calibration.samples import Sample
from dlrm_sharded.calibration.start_file import (
    FirstStart,
    find_start,
    start_digest,
    start_folder,
    with_start,
)
from dlrm_sharded.cost.learned import LearnedCostModel, learned_cost_model
from dlrm_sharded.cost.price_file import is_price_file, read_prices, write_prices
from dlrm_sharded.files.errors import ConfigError, check_number, check_path
from dlrm_sharded.files.line_file import named, turn
from dlrm_sharded.files.user_cache import journal_folder
from dlrm_sharded.hardware.artifact import ARTIFACT_SUFFIX
from dlrm_sharded.hardware.context import RunContext
from dlrm_sharded.plans.standing import Standing

if TYPE_CHECKING:
    from dlrm_sharded.calibration.adapt import Adapted

log = logging.getLogger(__name__)

AUTO, NEVER = "auto", "never"

AS_CLOSE = 0.02
"""Difference between errors that noise may make."""

START_S, MAX_START_S = 20.0, 3600.0
"""Time in which a first start measures by default, and at most."""

TURN_S = 60.0
"""Time to wait for another job of the sweep that computes its prices."""


def hardware_cost_model(
    context: RunContext,
    artifact: str | None = None,
    journal: str | None = None,
    gpu: Mapping[str, Any] | None = None,
    snapshot: str | None = None,
    calibrate: str | float = NEVER,
) -> LearnedCostModel:
    """Load the cost model of a run's hardware, corrected by the runs that were measured there.

    A prior is adapted to what the first start and the runs measured there, in one fit.

    A file of prices is what a run had (`cost.price_file`), and is not corrected.

    Args:
        artifact: file of a fitted model, or of prices; None to look for the model of the hardware.
        journal: see `run_journal`.
        gpu: see `learned_cost_model`.
        snapshot: folder in which the jobs of a sweep share their prices: the first one on some
            hardware writes them, the others read them. None for no such folder.
        calibrate: "never" leaves out what a first start measured, see `start_budget_s`.

    Raises:
        ConfigError: `gpu` cannot be used, or `journal` is no folder's path.
        DataError: the artefact is missing or damaged.
    """
    if isinstance(artifact, str) and is_price_file(Path(artifact)):
        return read_prices(Path(artifact))
    if snapshot is not None:
        check_path("cost_model.snapshot", snapshot)
    start = None
    if artifact is None and start_budget_s(calibrate) is not None:
        start = find_start(context, start_folders(context, snapshot))
    if snapshot is None:
        return _picture_now(context, artifact, journal, gpu, start)
    name = _name_in_snapshot(context, artifact, gpu, start)
    path = Path(snapshot) / f"{name}{ARTIFACT_SUFFIX}"
    path.parent.mkdir(parents=True, exist_ok=True)
    doing = "computes the prices of this sweep"
    with turn(path.with_suffix(".lock"), doing=doing, limit_s=TURN_S):
        if not path.exists():
            write_prices(path, _picture_now(context, artifact, journal, gpu, start))
    log.info("prices: the snapshot %s", path)
    return read_prices(path)


def start_budget_s(calibrate: object) -> float | None:
    """Return the time in which a first start may measure, in s; None if it must not.

    Args:
        calibrate: "auto", "never" or a number of seconds, also as text.

    Raises:
        ConfigError: it is none of these.
    """
    if calibrate == AUTO:
        return START_S
    if calibrate == NEVER:
        return None
    with contextlib.suppress(ValueError):  # an environment variable is a text
        calibrate = float(calibrate) if isinstance(calibrate, str) else calibrate
    check_number("calibrate (auto, never or seconds)", calibrate, above=True, most=MAX_START_S)
    assert isinstance(calibrate, int | float)
    return float(calibrate)


def start_folders(context: RunContext, snapshot: str | None) -> list[Path]:
    """Return where to look for what a first start measured: this one, the sweep's, the cache's."""
    own = [] if context.started is None else [context.started]
    return [*own, *([] if snapshot is None else [Path(snapshot)]), start_folder()]


def _name_in_snapshot(
    context: RunContext,
    artifact: str | None,
    gpu: Mapping[str, Any] | None,
    start: FirstStart | None,
) -> str:
    """Return a name for the prices of jobs that must share them: alike but for data and sharder."""
    of_run = context.hardware
    hardware = None if of_run is None else of_run.fingerprint or of_run.name
    run = dataclasses.replace(context, hardware=None, started=None)
    alike = run, hardware, artifact, gpu and dict(gpu), start and start_digest(start)
    return hashlib.sha256(repr(alike).encode()).hexdigest()[:16]


def _picture_now(
    context: RunContext,
    artifact: str | None,
    journal: str | None,
    gpu: Mapping[str, Any] | None,
    start: FirstStart | None,
) -> LearnedCostModel:
    """Return the model as it is now, corrected by all runs so far."""
    prior = learned_cost_model(context, artifact, gpu, warns=start is None)
    if start is not None and not needs_start(prior, context):  # a calibration supersedes it
        prior, start = learned_cost_model(context, artifact, gpu), None
    model = prior
    if start is not None:
        model = with_start(prior, start, num_ranks=context.ranks_per_host or 1)
    conditions, runs = conditions_of(context), run_journal(context, journal)
    if conditions is None or runs is None:
        return model
    found = runs.read(conditions)
    return corrected(
        model,
        list(found.values()),
        started=None if start is None else (prior, start.samples),
        source=f"the journal {runs.path}",
        names=[f"line {number}" for number in found],
    )


def needs_start(model: object, context: RunContext) -> bool:
    """Return whether a model is a prior of the run's type of device, which measurements adapt."""
    return (
        isinstance(model, LearnedCostModel)
        and model.device == context.device
        and model.standing is not None
        and model.standing.kind == "prior"
    )


def corrected(
    model: LearnedCostModel,
    runs: Sequence[Sample],
    *,
    started: tuple[LearnedCostModel, Sequence[Sample]] | None = None,
    source: str = "the runs",
    names: Sequence[str] | None = None,
) -> LearnedCostModel:
    """Return the model adapted to runs, or the model itself where that predicts them no better.

    Runs that contradict the others are left out, with one warning.

    Args:
        runs: the latest last.
        started: for a model that a first start has adapted, its prior and what was measured. The
            prior is then adapted to both.
        source, names: what the warning calls the runs together, and each of them.
    """
    if not runs:
        return model
    from dlrm_sharded.calibration.adapt import adapt  # loads SciPy, which takes half a second

    prior, start = started or (model, ())
    confidence = Confidence.of_standing(model.standing)
    adapted = adapt(prior, runs, start=start, confidence=confidence)
    num_runs = len(runs) - len(adapted.outliers)
    if adapted.outliers:
        names = names or [f"run {number}" for number in range(1, len(runs) + 1)]
        log.warning(
            "%d of %d runs in %s %s left out, as the others contradict: %s",
            len(adapted.outliers),
            len(runs),
            source,
            "is" if len(adapted.outliers) == 1 else "are",
            named([f"{names[found.index]} ({found.text})" for found in adapted.outliers]),
        )
    if num_runs == 0:
        return model
    if not _is_trusted(adapted, model, has_start=started is not None):
        log.info(
            "the earlier runs (%d) on this hardware do not correct the cost model: its critical "
            "paths are off by %.0f %% on them, corrected ones by %.0f %%, and by %.0f %% on others",
            num_runs,
            *(100 * error for error in (adapted.error_before, adapted.error_after)),
            100 * adapted.expected_error,
        )
        return model
    standing = model.standing or Standing("prior", model.name)
    left_out = {outlier.index for outlier in adapted.outliers}
    counting = [run for index, run in enumerate(runs) if index not in left_out]
    num_disturbed = sum(is_disturbed(run.noise) for run in counting)
    reasons = standing.reasons
    if num_disturbed:
        reasons = (*reasons, f"{num_disturbed} of {num_runs} runs measured beside other work")
    rank_error = adapted.rank_error
    return dataclasses.replace(
        adapted.model,
        standing=dataclasses.replace(
            standing,
            reasons=reasons,
            num_runs=num_runs,
            error=adapted.stated_error,
            rank_error=standing.rank_error if rank_error is None and start else rank_error,
        ),
    )


def _is_trusted(adapted: Adapted, model: LearnedCostModel, *, has_start: bool) -> bool:
    """Return whether a correction helps on its runs, and on runs that were left out.

    Against a prior, being closer than its stated error is help enough. After a first start, which
    the fit has as well, so is being as close but for noise: critical paths do not show what the
    runs tell of single parts.
    """
    if has_start:
        return max(adapted.error_after, adapted.expected_error) <= adapted.error_before + AS_CLOSE
    limit, standing = adapted.error_before, model.standing
    if standing is not None and standing.kind == "prior":
        limit = max(limit, standing.error or 0.0)
    return adapted.is_better and adapted.expected_error <= limit


def run_journal(
    context: RunContext, journal: str | None, *, outbox: Path | None = None
) -> SampleStore | None:
    """Return the journal of a run's hardware.

    Args:
        journal: folder of journals; "auto" for the one in the user's cache, None or "none" for
            none.
        outbox: see `LineFile`.

    Raises:
        ConfigError: it is no path.
    """
    if journal in (None, "none"):
        return None
    if not isinstance(journal, str):
        raise ConfigError(f"journal is {journal!r}, must be auto, null or the path of a folder")
    if journal != AUTO:
        check_path("journal", journal)
    if context.hardware is None or context.hardware.fingerprint is None:
        return None
    return SampleStore(
        context.hardware.fingerprint.path_in(journal_folder(journal), ".jsonl"), outbox
    )


def conditions_of(context: RunContext) -> Conditions | None:
    """Return what runs must have in common with this one; None for a plan made elsewhere."""
    if context.optimizer is None or context.ranks_per_host is None:
        return None
    fingerprint = None if context.hardware is None else context.hardware.fingerprint
    return Conditions(
        context.optimizer,
        context.ranks_per_host,
        context.fbgemm,
        context.device,
        threads=None if fingerprint is None else fingerprint.cpu.threads,
    )
