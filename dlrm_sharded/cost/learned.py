"""The cost model that is calibrated on measurements of one kind of hardware."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from dlrm_sharded.cost.base import CostedTask, workload_cost
from dlrm_sharded.cost.communication import CommunicationModel
from dlrm_sharded.cost.compute import ComputeModel
from dlrm_sharded.cost.exchange_curves import EvenVolumes, ExchangeCurves, Exchanges
from dlrm_sharded.cost.exchange_terms import LINKS, Hosts
from dlrm_sharded.cost.expected_profiles import with_expected_profiles
from dlrm_sharded.cost.features import EXTENT, extent_of
from dlrm_sharded.cost.precision_conversions import (
    CPU_CONVERSIONS,
    ConversionTimes,
    gpu_conversions,
)
from dlrm_sharded.cost.workload import Workload, workload_of_plan
from dlrm_sharded.hardware.artifact_kinds import other_device_caveat
from dlrm_sharded.hardware.gpus.gpu_specs import GENERIC, find_gpu_spec, gpu_specs
from dlrm_sharded.plans.cost_provenance import CostProvenance
from dlrm_sharded.plans.plan import ShardingPlan, with_precisions
from dlrm_sharded.plans.plan_cost import PlanCost
from dlrm_sharded.plans.precision import FP32_EXCHANGE, ExchangePrecision
from dlrm_sharded.plans.task import ShardingTask, Topology

log = logging.getLogger(__name__)

KIND = "learned"
ANY_VALUE = (0.0, 1e18)
"""Range of a quantity in which a prior, which was not fitted, does not extrapolate."""

RANGE_SLACK = 1.1
"""Factor by which a quantity may leave its fitted range without a warning."""


@dataclass(frozen=True, slots=True, eq=False)
class LearnedCostModel:
    """Predicts what `measuring.measure` measures, from random plans on the same hardware.

    The idea is NeuroShard's (arXiv:2305.01868, sec. 3.2): costs of random ranks, pre-trained nets.
    `compute` and `communication` describe the differences.

    Args:
        name: name of the hardware.
        device: type of the device that computed, "cpu" or "cuda".
        ranges: lowest and highest fitted value, by name of `features.EXTENT`.
        measured_links: the `communication.LINKS` that were measured; the other links take the
            bandwidths that a topology states.
        provenance: origin of the costs and their expected error.
        correction: factors for the parts of a time, fitted to measured runs, by direction or
            exchange; None without runs. The costs already include them.
    """

    costs_name: ClassVar[str] = "learned"

    compute: ComputeModel
    communication: Exchanges
    name: str
    device: str
    ranges: dict[str, tuple[float, float]]
    measured_links: tuple[str, ...]
    provenance: CostProvenance | None = None
    correction: Mapping[str, Sequence[float]] | None = None

    def __repr__(self) -> str:
        costs = "unknown costs" if self.provenance is None else self.provenance.text
        runs = "no runs" if self.correction is None else "measured runs"
        return f"LearnedCostModel of {self.name} ({self.device})\n  {costs}\n  corrected by {runs}"

    def cost_task(self, task: ShardingTask) -> CostedTask:
        """Return the task with its costs; tables without a profile get the expected one."""
        return CostedTask(
            model=self,
            task=with_expected_profiles(task, self.compute),
            compute=self.compute,
            communication=self.communication_at(EvenVolumes.of_task(task), task.exchange_precision),
            hosts=Hosts.from_topology(task.topology, measured=self.measured_links),
            provenance=self.provenance,
            caveat=self.caveat(task.topology),
        )

    def communication_at(
        self, even: EvenVolumes, precision: ExchangePrecision = FP32_EXCHANGE
    ) -> CommunicationModel:
        """Return the costs of exchanges in a precision, near even volumes."""
        lines = self.communication.at(even)
        return lines if precision.is_exact else lines.with_precision(precision, _conversions(self))

    def predict(self, plan: ShardingPlan, task: ShardingTask) -> PlanCost:
        """Predict a plan; warn of assumptions and of quantities outside the fitted range."""
        costed = self.cost_task(with_precisions(task, plan))
        workload = workload_of_plan(plan, costed.task)
        self._warn(workload, task.topology)
        return costed.predict_workload(workload)

    def _warn(self, workload: Workload, topology: Topology) -> None:
        """Warn of what the model assumes for a workload."""
        for beyond in self.beyond_range(workload):
            log.warning("the cost model of %s extrapolates linearly: %s", self.name, beyond)
        # groups of some ranks: neither column shards nor row blocks over all ranks
        within_groups = (workload.group_size > 1) & (workload.group_size < workload.world_size)
        if within_groups.any() and isinstance(self.communication, CommunicationModel):
            log.warning(
                "row blocks on the ranks of one host were not measured for the cost model of %s; "
                "they are predicted as row blocks over all ranks and an exchange between hosts",
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
        """Return the caveat if the ranks compute on another type of device, else None."""
        return other_device_caveat(self.name, self.device, topology.compute_device)

    def unknown_links(self, topology: Topology) -> list[str]:
        """Return the links of the topology that are neither measured nor stated."""
        stated = topology.intra_host_bytes_per_s, topology.inter_host_bytes_per_s
        is_used = topology.ranks_per_host > 1, topology.world_size > topology.ranks_per_host
        return [
            link
            for link, used, bandwidth in zip(LINKS, is_used, stated, strict=True)
            if used and bandwidth is None and link not in self.measured_links
        ]

    def beyond_range(self, workload: Workload) -> list[str]:
        """Return a text for each quantity of a workload outside the fitted range."""
        texts = []
        for name, (low, high) in zip(EXTENT, extent_of(workload).tolist(), strict=True):
            fitted_low, fitted_high = self.ranges[name]
            if low < fitted_low / RANGE_SLACK or high > fitted_high * RANGE_SLACK:
                fitted = _interval(fitted_low, fitted_high)
                texts.append(f"{name} {_interval(low, high)}, fitted on {fitted}")
        return texts

    def predict_workload(self, workload: Workload, hosts: Hosts) -> PlanCost:
        """Predict the cost of the shards of a workload whose task is not known, on any hosts."""
        communication = self.communication_at(EvenVolumes.of_workload(workload, hosts))
        return workload_cost(workload, self.compute, communication, hosts)


def _conversions(model: LearnedCostModel) -> Mapping[str, ConversionTimes]:
    """Return the measured times to convert numbers, or what to expect of the hardware."""
    if model.device == "cpu":
        return CPU_CONVERSIONS
    if isinstance(model.communication, ExchangeCurves):
        return gpu_conversions(model.communication.host.spec.memory_gb_per_s)
    return gpu_conversions((find_gpu_spec(model.name) or gpu_specs()[GENERIC]).memory_gb_per_s)


def _interval(low: float, high: float) -> str:
    numbers = (f"{value:,.0f}" if value >= 10 else f"{value:.2g}" for value in (low, high))
    return " to ".join(dict.fromkeys(numbers))
