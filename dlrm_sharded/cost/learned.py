"""The cost model that is calibrated on measurements of some hardware."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from dlrm_sharded.cost.base import PricedTask, workload_cost
from dlrm_sharded.cost.codecs import CPU_CODECS, CodecTimes, codecs_from_array, gpu_codecs
from dlrm_sharded.cost.communication import (
    EXCHANGES,
    LINKS,
    UNMEASURED,
    CommunicationModel,
    Hosts,
    with_stated,
)
from dlrm_sharded.cost.compute import ComputeModel
from dlrm_sharded.cost.exchange_curves import TRIAL_VOLUMES, EvenVolumes, ExchangeCurves
from dlrm_sharded.cost.expected_profiles import with_expected_profiles
from dlrm_sharded.cost.features import EXTENT, extent_of
from dlrm_sharded.cost.gpu_prior import GpuPrior, gpu_prior
from dlrm_sharded.cost.kernel_changes import UNNAMED_FBGEMM, changes_between
from dlrm_sharded.cost.learned_arrays import from_arrays, learned_features
from dlrm_sharded.cost.prior import standing_of_artifact
from dlrm_sharded.cost.trial import check_trial_plans
from dlrm_sharded.cost.workload import Workload, workload_of_plan
from dlrm_sharded.files.provenance import fbgemm_version
from dlrm_sharded.hardware.artifact import (
    Artifact,
    built_from,
    find_artifact,
    has_artifact,
    load_artifact,
)
from dlrm_sharded.hardware.artifact_kinds import cost_model_kind, other_device_caveat
from dlrm_sharded.hardware.compare import Match
from dlrm_sharded.hardware.context import RunContext
from dlrm_sharded.plans.plan import ShardingPlan, with_precisions
from dlrm_sharded.plans.plan_cost import DIRECTIONS, PlanCost
from dlrm_sharded.plans.precision import FP32_EXCHANGE, ExchangePrecision
from dlrm_sharded.plans.standing import Standing
from dlrm_sharded.plans.task import ShardingTask, Topology

log = logging.getLogger(__name__)

KIND = "learned"
ANY_VALUE = (0.0, 1e18)
"""Range of a quantity in which a prior, which was not fitted, does not extrapolate."""

RANGE_SLACK = 1.1
"""Factor by which a quantity may leave its fitted range without a warning."""


@dataclass(frozen=True, slots=True, eq=False)
class LearnedCostModel:
    """Predicts what `calibration.measure` measures, from random plans on the same hardware.

    The idea is NeuroShard's (arXiv:2305.01868, sec. 3.2): costs of random ranks, pre-trained nets.
    `compute` and `communication` describe the differences.

    Args:
        name: name of the hardware.
        device: type of the device that computed, "cpu" or "cuda".
        ranges: lowest and highest fitted value, by name of `features.EXTENT`.
        measured_links: the `communication.LINKS` that were measured; the other links take the
            bandwidths that a topology states.
        standing: origin of the prices and their expected error.
        exchange_curves: times of exchanges that are not linear, of a prior; None if `communication`
            was fitted. `price` takes lines that are right for a task; those in `communication` are
            of `TRIAL_VOLUMES`, for an artefact.
        codecs: times to convert what is exchanged; None for those of hardware nobody measured.
        correction: factors that measured runs decided, of the parts of a time, by direction or
            exchange; None without runs. The prices have these factors already.
    """

    costs_name: ClassVar[str] = "learned"

    compute: ComputeModel
    communication: CommunicationModel
    name: str
    device: str
    ranges: dict[str, tuple[float, float]]
    measured_links: tuple[str, ...]
    standing: Standing | None = None
    exchange_curves: ExchangeCurves | None = None
    codecs: Mapping[str, CodecTimes] | None = None
    correction: Mapping[str, Sequence[float]] | None = None

    def __repr__(self) -> str:
        prices = "unknown prices" if self.standing is None else self.standing.text
        runs = "no runs" if self.correction is None else "measured runs"
        return f"LearnedCostModel of {self.name} ({self.device})\n  {prices}\n  corrected by {runs}"

    def price(self, task: ShardingTask) -> PricedTask:
        """Return the task with its prices; tables without a profile get the expected one."""
        return PricedTask(
            model=self,
            task=with_expected_profiles(task, self.compute),
            compute=self.compute,
            communication=self.communication_at(EvenVolumes.of_task(task), task.exchange_precision),
            hosts=Hosts.from_topology(task.topology, measured=self.measured_links),
            standing=self.standing,
            caveat=self.caveat(task.topology),
        )

    def communication_at(
        self, even: EvenVolumes, precision: ExchangePrecision = FP32_EXCHANGE
    ) -> CommunicationModel:
        """Return the prices of exchanges in a precision, near even volumes.

        Fitted exchanges are linear, and hold for all volumes. Curves become lines.
        """
        curves, lines = self.exchange_curves, self.communication
        if curves is not None:
            lines = dataclasses.replace(curves.at(even), sequences=lines.sequences)
        return lines if precision.is_exact else lines.with_precision(precision, _codecs(self))

    def predict(self, plan: ShardingPlan, task: ShardingTask) -> PlanCost:
        """Predict a plan; warn of assumptions and of quantities outside the fitted range."""
        priced = self.price(with_precisions(task, plan))
        workload = workload_of_plan(plan, priced.task)
        self._warn(workload, task.topology)
        return priced.predict_workload(workload)

    def _warn(self, workload: Workload, topology: Topology) -> None:
        """Warn of what the model assumes for a workload."""
        for beyond in self.beyond_range(workload):
            log.warning("the cost model of %s extrapolates linearly: %s", self.name, beyond)
        # groups of some ranks: neither column shards nor row blocks over all ranks
        within_groups = (workload.group_size > 1) & (workload.group_size < workload.world_size)
        if within_groups.any() and self.exchange_curves is None:
            log.warning(
                "row blocks on the ranks of one host were not measured for the cost model of %s; "
                "they are priced as row blocks over all ranks and an exchange between hosts",
                self.name,
            )
        for link in self.unknown_links(topology):
            log.warning(
                "the cost model of %s has no measurements of the links between ranks of %s, and "
                "topology.%s_host_gb_per_s is not given; 1 GB/s is assumed",
                self.name,
                "one host" if link == "intra" else "different hosts",
                link,
            )

    def caveat(self, topology: Topology) -> str | None:
        """Return the caveat for ranks of another device; None for ranks of the same."""
        return other_device_caveat(self.name, self.device, topology.compute_device)

    def unknown_links(self, topology: Topology) -> list[str]:
        """Return the links of the topology that are neither measured nor stated."""
        stated = {
            "intra": topology.intra_host_bytes_per_s,
            "inter": topology.inter_host_bytes_per_s,
        }
        used = {
            "intra": topology.ranks_per_host > 1,
            "inter": topology.world_size > topology.ranks_per_host,
        }
        return [
            link
            for link in LINKS
            if used[link] and link not in self.measured_links and stated[link] is None
        ]

    def beyond_range(self, workload: Workload) -> list[str]:
        """Return a text for each quantity of a workload outside the fitted range."""
        texts = []
        for name, (low, high) in zip(EXTENT, extent_of(workload).tolist(), strict=True):
            fitted_low, fitted_high = self.ranges[name]
            if low < fitted_low / RANGE_SLACK or high > fitted_high * RANGE_SLACK:
                texts.append(
                    f"{name} {_number(low)} to {_number(high)}, fitted on "
                    f"{_number(fitted_low)} to {_number(fitted_high)}"
                )
        return texts

    def predict_workload(self, workload: Workload, hosts: Hosts) -> PlanCost:
        """Predict the cost of the shards of a workload whose task is not known, on any hosts."""
        communication = self.communication_at(EvenVolumes.of_workload(workload, hosts))
        return workload_cost(workload, self.compute, communication, hosts)

    def predict_trial(self, workload: Workload) -> PlanCost:
        """Predict the cost on one host, for trials of the model."""
        return self.predict_workload(workload, Hosts(workload.world_size, workload.world_size))


def learned_cost_model(
    context: RunContext,
    artifact: str | None = None,
    gpu: Mapping[str, Any] | None = None,
    *,
    warns: bool = True,
) -> LearnedCostModel:
    """Load the model of a run's hardware, or with a warning one of other hardware.

    On GPUs, if none was calibrated, it is the prior of the run's GPU.

    Args:
        artifact: file of a fitted model; None to look for the one of the hardware in the package,
            and in `context.calibrated` if that names a folder.
        gpu: figures of a GPU that is in no data sheet of the package, see `GpuSpec.stated`; its
            prior is used, even if a GPU is calibrated.
        warns: see `load_artifact`.

    Raises:
        DataError: the file is missing or damaged, or there is none.
        ConfigError: the figures of the GPU cannot be used.
    """
    kind = cost_model_kind(KIND)
    needs_prior = gpu is not None or not has_artifact(kind, "cuda", context.calibrated)
    if artifact is None and context.device == "cuda" and needs_prior:
        return prior_cost_model(context, gpu)
    loaded = load_artifact(artifact, kind, learned_features, context, warns=warns)
    with built_from(loaded, kind):
        model = _from_artifact(loaded)
        check_trial_plans(model.predict_trial)
        model = dataclasses.replace(model, standing=standing_of_artifact(loaded))
        model = _with_kernels_of(model, loaded, context)
    if model.device == "cuda" and not model.measured_links:
        model = _with_exchanges_of(model, gpu_prior(model.name, None))
    if loaded.match is not None and not loaded.match.is_same:
        model = _at_speed_of(model, loaded.match)
    if model.device != context.device:
        # Exchanges between CPUs do not predict exchanges between GPUs.
        model = dataclasses.replace(
            model, communication=with_stated(UNMEASURED, measured=()), measured_links=()
        )
    return model


def shipped_prior(context: RunContext) -> LearnedCostModel:
    """Return the packaged model with which a calibration begins, not scaled by any probe.

    Raises:
        DataError: the package has no sound model.
    """
    if context.device == "cuda":
        return prior_cost_model(context)
    packaged = find_artifact(cost_model_kind(KIND), context.hardware, context.device)
    # without the hardware there is no warning that the model is of another one
    return learned_cost_model(RunContext(context.device), str(packaged))


def prior_cost_model(context: RunContext, gpu: Mapping[str, Any] | None = None) -> LearnedCostModel:
    """Return the model of a run's GPU from public figures, see `gpu_prior`."""
    name = None if context.hardware is None else context.hardware.name
    prior = gpu_prior(name, context.optimizer, gpu)
    level = logging.WARNING if prior.is_generic else logging.INFO
    log.log(level, "cost model: prior of %s: %s", prior.spec.key, prior.standing.reasons[0])
    return LearnedCostModel(
        prior.compute,
        prior.exchanges.at(TRIAL_VOLUMES),
        name=prior.standing.hardware,
        device="cuda",
        ranges=dict.fromkeys(EXTENT, ANY_VALUE),
        measured_links=LINKS,
        standing=prior.standing,
        exchange_curves=prior.exchanges,
        codecs=gpu_codecs(prior.spec.memory_gb_per_s),
    )


def _with_exchanges_of(model: LearnedCostModel, prior: GpuPrior) -> LearnedCostModel:
    """Give what was calibrated on one GPU the exchanges that its prior has for several."""
    exchanges = prior.exchanges.at(TRIAL_VOLUMES)
    return dataclasses.replace(
        model,
        communication=dataclasses.replace(exchanges, sequences=model.communication.sequences),
        measured_links=LINKS,
        exchange_curves=prior.exchanges,
    )


def _codecs(model: LearnedCostModel) -> Mapping[str, CodecTimes]:
    """Return the measured times to convert numbers, or what to expect of the hardware."""
    if model.codecs is not None:
        return model.codecs
    if model.device == "cuda":
        return gpu_codecs(gpu_prior(model.name, None).spec.memory_gb_per_s)
    return CPU_CODECS


def _from_artifact(loaded: Artifact) -> LearnedCostModel:
    compute, communication = from_arrays(loaded.arrays, loaded.meta["device"])
    ranges = {name: _range(name, loaded.meta["ranges"][name]) for name in EXTENT}
    measured_links = tuple(loaded.meta["measured_links"])
    if not set(measured_links) <= set(LINKS):
        raise ValueError(f"measured_links is {measured_links}")
    codecs = loaded.arrays.get("codecs")
    return LearnedCostModel(
        compute,
        communication,
        name=loaded.meta["hardware"],
        device=loaded.meta["device"],
        ranges=ranges,
        measured_links=measured_links,
        codecs=None if codecs is None else codecs_from_array(codecs),
    )


def _at_speed_of(model: LearnedCostModel, match: Match) -> LearnedCostModel:
    """Scale a prior by the probes: computation by gathers, measured exchanges by all-to-alls.

    How certain they were where they were fitted says nothing of hardware with other figures.
    """
    factor = match.compute_factor
    uncertainty = None if match.speeds else model.compute.uncertainty
    exchanges = model.communication.scaled(dict.fromkeys(EXCHANGES, match.exchange_factor))
    return dataclasses.replace(
        model,
        compute=dataclasses.replace(
            model.compute.scaled(forward=factor, backward=factor), uncertainty=uncertainty
        ),
        communication=with_stated(exchanges, measured=model.measured_links),
        codecs={name: times.scaled(factor) for name, times in _codecs(model).items()},
    )


def _with_kernels_of(
    model: LearnedCostModel, loaded: Artifact, context: RunContext
) -> LearnedCostModel:
    """Scale a direction whose kernel FBGEMM changed since the model was fitted, and say so.

    The prices are a prior then: the factor was measured on other hardware, so the stated error is
    at least that of a model without it.
    """
    fitted = loaded.meta["optimizer"]
    is_of_run = (model.device, context.optimizer or fitted) == (context.device, fitted)
    if context.fbgemm is None or not is_of_run:
        return model
    theirs = fbgemm_version(loaded.meta.get("versions") or {})
    changes = changes_between(theirs, context.fbgemm, device=model.device, optimizer=fitted)
    for change, factor in changes.items():
        factors = dict.fromkeys(DIRECTIONS, 1.0) | {change.direction: factor}
        standing = model.standing
        assert standing is not None
        reason = (
            f"FBGEMM {context.fbgemm} here, {theirs or UNNAMED_FBGEMM} there: {change.direction} "
            f"computation with {change.optimizer} takes {factor:.2g} times as long"
        )
        model = dataclasses.replace(
            model,
            compute=model.compute.scaled(**factors),
            standing=dataclasses.replace(
                standing,
                kind="prior",
                reasons=(*standing.reasons, reason),
                error=None if standing.error is None else max(standing.error, abs(factor - 1)),
            ),
        )
    return model


def _range(name: str, bounds: Any) -> tuple[float, float]:
    low, high = (float(bound) for bound in bounds)
    if not -math.inf < low <= high < math.inf:
        raise ValueError(f"the range of {name} is {bounds}")
    return low, high


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"
