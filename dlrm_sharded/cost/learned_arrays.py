"""Calibrated cost models as the content of artifacts."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from dlrm_sharded.cost.communication import EXCHANGES, CommunicationModel
from dlrm_sharded.cost.compute import ComputeModel, CostNet, DenseCosts
from dlrm_sharded.cost.exchange_curves import ExchangeCurves, Exchanges
from dlrm_sharded.cost.exchange_terms import EXCHANGE_TERMS, REDUCE_TERMS, Hosts
from dlrm_sharded.cost.features import DEVICE_WORK, PROFILE
from dlrm_sharded.cost.learned import LearnedCostModel
from dlrm_sharded.cost.sequences import SequenceCosts
from dlrm_sharded.cost.trial import try_predicting
from dlrm_sharded.cost.widest import WIDEST_TERMS, WidestShard
from dlrm_sharded.hardware.artifact import Arrays, Artifact
from dlrm_sharded.hardware.gpus.collectives import HostCollectives
from dlrm_sharded.hardware.gpus.gpu_specs import GpuSpec
from dlrm_sharded.plans.plan_cost import DIRECTIONS

_OF_PROFILES = ("profile_mean", "profile_std", "profile_low", "profile_high")
_OF_CACHES = ("cache_gain", "cache_mb", "cache_slope")
"""Arrays of a model, and of each of its nets, that are stored as they are."""

CURVES = "curves."
"""Prefix of the names of arrays with the factors of an exchange's curve."""


def learned_features(device: str) -> dict[str, list[str]]:
    """Return the names of a model's inputs on a type of device, for the header of its artifact."""
    work = DEVICE_WORK[device]
    return {
        "work": list(work.terms),
        "profile": list(PROFILE),
        "exchange": list(EXCHANGE_TERMS),
        "reduce": list(REDUCE_TERMS),
        **({"widest": list(WIDEST_TERMS)} if work.has_warps else {}),
    }


def to_arrays(compute: ComputeModel, exchanges: Exchanges) -> Arrays:
    """Return the arrays for an artifact's file."""
    arrays: Arrays = {key: getattr(compute, key) for key in _OF_PROFILES}
    for direction, net in zip(DIRECTIONS, compute.nets, strict=True):
        for i, (weight, bias) in enumerate(zip(net.weights, net.biases, strict=True)):
            arrays[f"{direction}.weight_{i}"], arrays[f"{direction}.bias_{i}"] = weight, bias
        for key in _OF_CACHES:
            arrays[f"{direction}.{key}"] = getattr(net, key)
        arrays[f"{direction}.launch_ms"] = np.array([net.launch_ms, net.next_launch_ms])
        if net.slopes is not None:
            arrays[f"{direction}.slopes"] = net.slopes
    if isinstance(compute.crowding, WidestShard):
        arrays["widest_ms"] = compute.crowding.term_ms
    else:
        arrays["sequences"] = np.array(dataclasses.astuple(compute.crowding))
    arrays["dense"] = np.array(dataclasses.astuple(compute.dense))
    arrays["sequence_bytes"] = exchanges.sequences
    if isinstance(exchanges, ExchangeCurves):
        return arrays | {CURVES + kind: factors for kind, factors in exchanges.factors.items()}
    arrays |= {"exchange": exchanges.exchange, "reduce": exchanges.reduce}
    return arrays | {"all_reduce": exchanges.all_reduce_weights}


def model_of_artifact(read: Artifact, spec: GpuSpec | None = None) -> LearnedCostModel:
    """Return the model that an artifact describes, without its provenance.

    Args:
        spec: the GPU whose exchanges are curves; None for lines.
    """
    meta, arrays = read.meta, read.arrays
    model = LearnedCostModel(
        _compute_of(arrays, meta["device"]),
        _exchanges_of(arrays, spec),
        name=meta["hardware"],
        device=meta["device"],
        ranges={name: (float(low), float(high)) for name, (low, high) in meta["ranges"].items()},
        measured_links=tuple(meta["measured_links"]),
    )
    try_predicting(
        lambda tried: model.predict_workload(tried, Hosts(tried.world_size, tried.world_size))
    )
    return model


def _compute_of(arrays: Arrays, device: str) -> ComputeModel:
    def net(direction: str) -> CostNet:
        layers = range(sum(key.startswith(f"{direction}.weight_") for key in arrays))
        of_caches: dict[str, Any] = {key: arrays[f"{direction}.{key}"] for key in _OF_CACHES}
        first_ms, next_ms = arrays[f"{direction}.launch_ms"].astype(float).tolist()[:2]
        return CostNet(
            weights=tuple(arrays[f"{direction}.weight_{i}"] for i in layers),
            biases=tuple(arrays[f"{direction}.bias_{i}"] for i in layers),
            **of_caches,
            launch_ms=first_ms,
            next_launch_ms=next_ms,
            slopes=arrays.get(f"{direction}.slopes"),  # adapted models have them
        )

    of_profiles: dict[str, Any] = {key: arrays[key] for key in _OF_PROFILES}
    return ComputeModel(
        **of_profiles,
        forward=net("forward"),
        backward=net("backward"),
        device=DEVICE_WORK[device],
        dense=DenseCosts(*arrays["dense"].tolist()),
        crowding=(
            WidestShard(arrays["widest_ms"])
            if DEVICE_WORK[device].has_warps
            else SequenceCosts(*arrays["sequences"].tolist())
        ),
    )


def _exchanges_of(arrays: Arrays, spec: GpuSpec | None) -> Exchanges:
    sequences = arrays["sequence_bytes"]
    if spec is None:
        return CommunicationModel(
            arrays["exchange"], arrays["reduce"], arrays["all_reduce"], sequences
        )
    curves = ExchangeCurves(HostCollectives(spec), sequences=sequences)
    factors = {kind: arrays[CURVES + kind] for kind in EXCHANGES if CURVES + kind in arrays}
    return curves.scaled(factors) if factors else curves  # 0.2 wrote no factors of priors
