"""The costs of a run's hardware: a prior, fitted to all samples that were measured there."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlrm_sharded.calibration.disturbance import is_disturbed
from dlrm_sharded.calibration.priors import learned_cost_model
from dlrm_sharded.calibration.sample_store import conditions_of, sample_store, store_in
from dlrm_sharded.calibration.samples import RUN, Sample
from dlrm_sharded.cost.cost_model_file import is_cost_model_file, read_cost_model, write_cost_model
from dlrm_sharded.cost.learned import LearnedCostModel
from dlrm_sharded.files.errors import check_number, check_path
from dlrm_sharded.files.line_file import named, turn
from dlrm_sharded.hardware.artifact import ARTIFACT_SUFFIX
from dlrm_sharded.hardware.context import RunContext
from dlrm_sharded.plans.cost_provenance import CostProvenance

if TYPE_CHECKING:  # loads SciPy: half a second
    from dlrm_sharded.calibration.sample_fit import SampleFit

log = logging.getLogger(__name__)

AUTO, NEVER = "auto", "never"

FIRST_RUN_S, MAX_S = 20.0, 3600.0
"""Time for which a first run measures by default, and the longest time that can be set."""

TURN_S = 60.0
"""Time to wait for another job of the sweep that computes its costs."""

Samples = Mapping[str, Sample]
"""Samples by the names that warnings use for them."""


def hardware_cost_model(
    context: RunContext,
    artifact: str | None = None,
    journal: str | None = None,
    gpu: Mapping[str, Any] | None = None,
    snapshot: str | None = None,
) -> LearnedCostModel:
    """Return the cost model of a run's hardware: its prior, fitted to the samples of its store.

    Args:
        artifact: file of the cost model of a run or a calibration (`cost.cost_model_file`), which
            is used unchanged, or of a prior; None to look for the one of the hardware.
        journal: see `sample_store`.
        gpu: see `learned_cost_model`.
        snapshot: folder in which the jobs of a sweep share a cost model: the first job on some
            hardware writes it, the others read it. None for no such folder.

    Raises:
        ConfigError: `gpu` cannot be used, or `journal` is not the path of a folder.
        DataError: the artifact is missing or damaged.
    """
    if isinstance(artifact, str) and is_cost_model_file(Path(artifact)):
        return read_cost_model(Path(artifact))
    samples = samples_of(context, journal, snapshot)
    if snapshot is None:
        return with_samples(context, samples, artifact, gpu)
    # jobs that measure first have other costs than before
    is_measured = any(sample.kind != RUN for sample in samples.values())
    name = _name_in_snapshot(context, artifact, gpu, is_measured=is_measured)
    path = Path(snapshot) / f"{name}{ARTIFACT_SUFFIX}"
    path.parent.mkdir(parents=True, exist_ok=True)
    doing = "computes the costs of this sweep"
    with turn(path.with_suffix(".lock"), doing=doing, limit_s=TURN_S):
        if not path.exists():
            write_cost_model(path, with_samples(context, samples, artifact, gpu))
    log.info("costs: the snapshot %s", path)
    return read_cost_model(path)


def samples_of(context: RunContext, journal: str | None, snapshot: str | None = None) -> Samples:
    """Return what was measured on a run's hardware under its conditions.

    Samples are in the store, and those that are not kept there in the folders of what this job and
    its sweep have measured.
    """
    stores = [sample_store(context, journal)]
    if context.samples_dir is not None:
        stores.append(store_in(context.samples_dir, context))
    if snapshot is not None:
        check_path("cost_model.snapshot", snapshot)
        stores.append(store_in(Path(snapshot), context))
    conditions, found = conditions_of(context), dict[str, Sample]()
    for store in stores:
        if store is not None and conditions is not None:
            # the folder of what this job has measured is temporary
            where = "this measurement" if store.path.parent == context.samples_dir else store.path
            found |= {f"{where}:{n}": of for n, of in store.read(conditions).items()}
    return found


def with_samples(
    context: RunContext,
    samples: Samples,
    artifact: str | None = None,
    gpu: Mapping[str, Any] | None = None,
) -> LearnedCostModel:
    """Return the prior of a run's hardware, fitted to samples.

    Samples that contradict the others are left out, with one warning.
    """
    prior = learned_cost_model(context, artifact, gpu, warns=not samples)
    if not samples:
        return prior
    from dlrm_sharded.calibration.sample_fit import fit_samples

    fitted = fit_samples(prior, list(samples.values()))
    if fitted.outliers:
        names = list(samples)
        texts = [f"{names[outlier.index]} ({outlier.text})" for outlier in fitted.outliers]
        log.warning(
            "%d of %d samples of this hardware %s left out, because the others contradict them: %s",
            len(texts),
            len(samples),
            "is" if len(texts) == 1 else "are",
            named(texts),
        )
    provenance = _provenance(prior, fitted, context)
    return dataclasses.replace(fitted.model, name=provenance.hardware, provenance=provenance)


def _provenance(prior: LearnedCostModel, fitted: SampleFit, context: RunContext) -> CostProvenance:
    """Return where the costs of a fit come from, and how far they are expected to be off."""
    before, samples = prior.provenance or CostProvenance("prior", prior.name), fitted.samples
    found = dataclasses.replace(before, error=fitted.error, rank_error=fitted.rank_error)
    num_runs = sum(sample.kind == RUN for sample in samples)
    num_disturbed = sum(is_disturbed(sample.noise) for sample in samples)
    reasons = [*before.reasons]
    if num_runs < len(samples) and before.kind == "prior":
        name = before.hardware if context.hardware is None else context.hardware.name
        found = dataclasses.replace(found, kind="measured", hardware=name)
        reasons = [f"{len(samples) - num_runs} plans were measured"]
    if (context.ranks_per_host or 1) > 1 and all(sample.world_size == 1 for sample in samples):
        found = dataclasses.replace(found, error=None)
        reasons.append("exchanges were not measured")
    if num_disturbed:
        reasons.append(f"{num_disturbed} of {len(samples)} plans while other processes ran")
    loaded = 2 * num_disturbed > len(samples)
    return dataclasses.replace(found, reasons=(*reasons,), num_runs=num_runs, under_load=loaded)


def needs_measuring(model: object, context: RunContext, *, exchanges: bool) -> bool:
    """Return whether nothing of a run's hardware was measured, apart from plans of runs.

    Args:
        exchanges: whether exchanges must have been measured, too.
    """
    if not isinstance(model, LearnedCostModel) or model.device != context.device:
        return False
    provenance = model.provenance
    if provenance is None or provenance.kind == "calibrated":
        return False
    return provenance.kind == "prior" or (exchanges and provenance.error is None)


def budget_in_s(calibrate: object) -> float | None:
    """Return the time in which a first run may measure, in s; None if it must not.

    Args:
        calibrate: "auto", "never" or a number of seconds, also as text.

    Raises:
        ConfigError: it is none of these.
    """
    if calibrate == AUTO:
        return FIRST_RUN_S
    if calibrate == NEVER:
        return None
    with contextlib.suppress(ValueError):  # an environment variable is a text
        calibrate = float(calibrate) if isinstance(calibrate, str) else calibrate
    check_number("calibrate (auto, never or seconds)", calibrate, above=True, most=MAX_S)
    assert isinstance(calibrate, int | float)
    return float(calibrate)


def _name_in_snapshot(
    context: RunContext, artifact: str | None, gpu: Mapping[str, Any] | None, *, is_measured: bool
) -> str:
    """Return a name for the costs that jobs share if they differ only in data and sharder."""
    of_run = context.hardware
    hardware = None if of_run is None else of_run.fingerprint or of_run.name
    run = dataclasses.replace(context, hardware=None, samples_dir=None)
    alike = run, hardware, artifact, gpu and dict(gpu), is_measured
    return hashlib.sha256(repr(alike).encode()).hexdigest()[:16]
