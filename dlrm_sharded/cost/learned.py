"""The cost model that is calibrated on measurements of some hardware."""

from __future__ import annotations

import dataclasses
import logging
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from dlrm_sharded.artifact import (
    Arrays,
    Artifact,
    built_from,
    cost_model_kind,
    load_artifact,
    other_device_caveat,
)
from dlrm_sharded.context import RunContext
from dlrm_sharded.cost.communication import (
    EXCHANGE_TERMS,
    LINKS,
    REDUCE_TERMS,
    UNMEASURED,
    CommunicationModel,
    Hosts,
    with_stated,
)
from dlrm_sharded.cost.compute import DIRECTIONS, ComputeModel, PriceNet
from dlrm_sharded.cost.expected_profiles import with_expected_profiles
from dlrm_sharded.cost.features import (
    DEVICE_WORK,
    EXTENT,
    PROFILE,
    Floats,
    Workload,
    workload_of_plan,
)
from dlrm_sharded.cost.trial import check_trial_plans
from dlrm_sharded.cost.widest import WIDEST_TERMS
from dlrm_sharded.plan import ShardingPlan
from dlrm_sharded.plan_cost import PlanCost
from dlrm_sharded.standing import Standing
from dlrm_sharded.task import ShardingTask, Topology

log = logging.getLogger(__name__)

KIND = "learned"
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
    """

    compute: ComputeModel
    communication: CommunicationModel
    name: str
    device: str
    ranges: dict[str, tuple[float, float]]
    measured_links: tuple[str, ...]
    standing: Standing | None = None

    def predict(self, plan: ShardingPlan, task: ShardingTask) -> PlanCost:
        """Predict a plan; warn of assumptions and of quantities outside the fitted range."""
        workload = workload_of_plan(plan, with_expected_profiles(task, self.compute))
        for beyond in self.beyond_range(workload):
            log.warning("the cost model of %s extrapolates linearly: %s", self.name, beyond)
        # groups of some ranks: neither column shards nor row blocks over all ranks
        within_groups = (workload.group_size > 1) & (workload.group_size < workload.world_size)
        if within_groups.any():
            log.warning(
                "row blocks on the ranks of one host were not measured for the cost model of %s; "
                "they are priced as row blocks over all ranks and an exchange between hosts",
                self.name,
            )
        for link in self.unknown_links(task.topology):
            log.warning(
                "the cost model of %s has no measurements of the links between ranks of %s, and "
                "topology.%s_host_gb_per_s is not given; 1 GB/s is assumed",
                self.name,
                "one host" if link == "intra" else "different hosts",
                link,
            )
        return self.predict_workload(workload, self.hosts(task.topology))

    def caveat(self, topology: Topology) -> str | None:
        """Return the caveat for ranks of another device; None for ranks of the same."""
        return other_device_caveat(self.name, self.device, topology.compute_device)

    def hosts(self, topology: Topology) -> Hosts:
        """Return the topology as the communication model sees it."""
        return Hosts.from_topology(topology, measured=self.measured_links)

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
        for name, (low, high) in zip(EXTENT, workload.extent().tolist(), strict=True):
            fitted_low, fitted_high = self.ranges[name]
            if low < fitted_low / RANGE_SLACK or high > fitted_high * RANGE_SLACK:
                texts.append(
                    f"{name} {_number(low)} to {_number(high)}, fitted on "
                    f"{_number(fitted_low)} to {_number(fitted_high)}"
                )
        return texts

    def predict_workload(self, workload: Workload, hosts: Hosts) -> PlanCost:
        """Predict the cost of the shards of a workload, on any hosts."""
        sums = workload.by_rank(self.compute.vectors(workload))
        forward, backward = self.compute.times_ms(sums, workload.num_lookups()).T
        return PlanCost.from_stages(
            {
                "fwd_compute": forward.tolist(),
                "fwd_comm": self.exchange_ms("fwd_comm", workload, hosts).tolist(),
                "bwd_comm": self.exchange_ms("bwd_comm", workload, hosts).tolist(),
                "bwd_compute": backward.tolist(),
            },
            input_dist_ms=self.exchange_ms("input_dist", workload, hosts).tolist(),
        )

    def predict_trial(self, workload: Workload) -> PlanCost:
        """Predict the cost on one host, for trials of the model."""
        return self.predict_workload(workload, Hosts(workload.world_size, workload.world_size))

    def exchange_ms(self, kind: str, workload: Workload, hosts: Hosts) -> Floats:
        """Return [W], time of one of `communication.EXCHANGES`."""
        exchange = workload.exchange(for_ids=kind == "input_dist")
        return self.communication.exchange_ms(kind, exchange, hosts)


def learned_cost_model(context: RunContext, artifact: str | None = None) -> LearnedCostModel:
    """Load the model of a run's hardware, or with a warning one of other hardware.

    Args:
        artifact: file of a fitted model; None to look for the one of the hardware.

    Raises:
        DataError: the file is missing or damaged, or there is none.
    """
    kind = cost_model_kind(KIND)
    loaded = load_artifact(artifact, kind, learned_features, context)
    with built_from(loaded, kind):
        model = _from_artifact(loaded)
        check_trial_plans(model.predict_trial)
    if model.device != context.device:
        # Exchanges between CPUs do not predict exchanges between GPUs.
        model = dataclasses.replace(
            model, communication=with_stated(UNMEASURED, measured=()), measured_links=()
        )
    return model


def _from_artifact(loaded: Artifact) -> LearnedCostModel:
    compute, communication = from_arrays(loaded.arrays, loaded.meta["device"])
    ranges = {name: _range(name, loaded.meta["ranges"][name]) for name in EXTENT}
    measured_links = tuple(loaded.meta["measured_links"])
    if not set(measured_links) <= set(LINKS):
        raise ValueError(f"measured_links is {measured_links}")
    return LearnedCostModel(
        compute,
        communication,
        name=loaded.meta["hardware"],
        device=loaded.meta["device"],
        ranges=ranges,
        measured_links=measured_links,
    )


def _range(name: str, bounds: Any) -> tuple[float, float]:
    low, high = (float(bound) for bound in bounds)
    if not -math.inf < low <= high < math.inf:
        raise ValueError(f"the range of {name} is {bounds}")
    return low, high


def learned_features(device: str) -> dict[str, list[str]]:
    """Return the names of a model's inputs on a type of device, for the header of its artefact."""
    work = DEVICE_WORK[device]
    return {
        "work": list(work.terms),
        "profile": list(PROFILE),
        "exchange": list(EXCHANGE_TERMS),
        "reduce": list(REDUCE_TERMS),
        **({"widest": list(WIDEST_TERMS)} if work.has_warps else {}),
    }


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def to_arrays(compute: ComputeModel, communication: CommunicationModel) -> Arrays:
    """Return the arrays for an artefact's file."""
    arrays: Arrays = {
        key: getattr(compute, key)
        for key in ("profile_mean", "profile_std", "profile_low", "profile_high")
    }
    for direction in DIRECTIONS:
        net: PriceNet = getattr(compute, direction)
        for i, (weight, bias) in enumerate(zip(net.weights, net.biases, strict=True)):
            arrays[f"{direction}.weight_{i}"], arrays[f"{direction}.bias_{i}"] = weight, bias
        for key in ("cache_gain", "cache_mb", "cache_slope"):
            arrays[f"{direction}.{key}"] = getattr(net, key)
        arrays[f"{direction}.launch_ms"] = np.array([net.launch_ms, net.next_launch_ms])
    if compute.widest_ms is not None:
        arrays["widest_ms"] = compute.widest_ms
    return {**arrays, "exchange": communication.exchange, "reduce": communication.reduce}


def from_arrays(arrays: Arrays, device: str) -> tuple[ComputeModel, CommunicationModel]:
    """Build the models of a type of device from the arrays of `to_arrays`."""

    def net(direction: str) -> PriceNet:
        layers = range(sum(key.startswith(f"{direction}.weight_") for key in arrays))
        return PriceNet(
            weights=tuple(arrays[f"{direction}.weight_{i}"] for i in layers),
            biases=tuple(arrays[f"{direction}.bias_{i}"] for i in layers),
            cache_gain=arrays[f"{direction}.cache_gain"],
            cache_mb=arrays[f"{direction}.cache_mb"],
            cache_slope=arrays[f"{direction}.cache_slope"],
            launch_ms=float(arrays[f"{direction}.launch_ms"][0]),
            next_launch_ms=float(arrays[f"{direction}.launch_ms"][1]),
        )

    compute = ComputeModel(
        profile_mean=arrays["profile_mean"],
        profile_std=arrays["profile_std"],
        profile_low=arrays["profile_low"],
        profile_high=arrays["profile_high"],
        forward=net("forward"),
        backward=net("backward"),
        device=DEVICE_WORK[device],
        widest_ms=arrays.get("widest_ms"),
    )
    return compute, CommunicationModel(arrays["exchange"], arrays["reduce"])
