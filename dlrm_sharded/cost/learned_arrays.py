"""The arrays of a calibrated cost model, as its artefact has them."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from dlrm_sharded.cost.communication import EXCHANGE_TERMS, REDUCE_TERMS, CommunicationModel
from dlrm_sharded.cost.compute import ComputeModel, DensePrices, PriceNet
from dlrm_sharded.cost.features import DEVICE_WORK, PROFILE
from dlrm_sharded.cost.sequences import SequencePrices
from dlrm_sharded.cost.widest import WIDEST_TERMS, WidestShard
from dlrm_sharded.hardware.artifact import Arrays
from dlrm_sharded.plans.plan_cost import DIRECTIONS

DENSE_PRICES = {"cpu": DensePrices(0.2, 0.5), "cuda": DensePrices(0.0, 0.004)}
"""Prices of dense gradients for models that were fitted to no replicas, by the type of device."""

SEQUENCE_PRICES = SequencePrices(0.2, 3.6)
"""Prices of sequences for models of CPUs that were fitted to none.

They were measured on an Intel Xeon with AVX-512, see docs/notes/cost_model.md.
"""

SEQUENCE_BYTES = {"cpu": np.array([[0.9, 1.1], [1.0, 1.4]]), "cuda": np.ones((2, 2))}
"""Bytes of bags that a byte of sequences counts for in models that were fitted to none, by device.

See `CommunicationModel`; those of CPUs were measured on an Intel Xeon with AVX-512.
"""

CPU_ALL_REDUCE = np.array(
    [{"peers_intra": 1400.0, "bytes": 1.0}.get(term, 0.0) for term in REDUCE_TERMS]
)
"""Weights of the all-reduce for models of CPUs that were fitted to no replicas.

These figures and those of dense gradients were measured on 2 gloo ranks of an AMD EPYC with one
thread each: replicas of 4 kB to 30 MB beside one table a rank, medians of 4 rounds.
"""


_OF_PROFILES = ("profile_mean", "profile_std", "profile_low", "profile_high")
_OF_CACHES = ("cache_gain", "cache_mb", "cache_slope")
"""Arrays of a model, and of each of its nets, that are stored as they are."""


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


def to_arrays(compute: ComputeModel, communication: CommunicationModel) -> Arrays:
    """Return the arrays for an artefact's file."""
    arrays: Arrays = {key: getattr(compute, key) for key in _OF_PROFILES}
    for direction in DIRECTIONS:
        net: PriceNet = getattr(compute, direction)
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
    arrays["all_reduce"] = communication.all_reduce_weights
    arrays["sequence_bytes"] = communication.sequence_factors
    return {**arrays, "exchange": communication.exchange, "reduce": communication.reduce}


def from_arrays(arrays: Arrays, device: str) -> tuple[ComputeModel, CommunicationModel]:
    """Build the models of a type of device from the arrays of `to_arrays`."""

    def net(direction: str) -> PriceNet:
        layers = range(sum(key.startswith(f"{direction}.weight_") for key in arrays))
        of_caches: dict[str, Any] = {key: arrays[f"{direction}.{key}"] for key in _OF_CACHES}
        first_ms, next_ms = arrays[f"{direction}.launch_ms"].astype(float).tolist()[:2]
        return PriceNet(
            weights=tuple(arrays[f"{direction}.weight_{i}"] for i in layers),
            biases=tuple(arrays[f"{direction}.bias_{i}"] for i in layers),
            **of_caches,
            launch_ms=first_ms,
            next_launch_ms=next_ms,
            slopes=arrays.get(f"{direction}.slopes"),  # adapted prices have them
        )

    of_profiles: dict[str, Any] = {key: arrays[key] for key in _OF_PROFILES}
    compute = ComputeModel(
        **of_profiles,
        forward=net("forward"),
        backward=net("backward"),
        device=DEVICE_WORK[device],
        dense=DensePrices(*arrays["dense"].tolist()) if "dense" in arrays else DENSE_PRICES[device],
        crowding=(
            WidestShard(arrays["widest_ms"])
            if DEVICE_WORK[device].has_warps
            else SequencePrices(*arrays["sequences"].tolist())
            if "sequences" in arrays
            else SEQUENCE_PRICES
        ),
    )
    all_reduce = arrays.get("all_reduce", CPU_ALL_REDUCE if device == "cpu" else None)
    sequences = arrays.get("sequence_bytes", SEQUENCE_BYTES[device])
    if sequences.shape != (2, 2) or not (sequences > 0.0).all():
        raise ValueError(f"sequence_bytes are {sequences.tolist()}, must be positive, [2, 2]")
    return compute, CommunicationModel(arrays["exchange"], arrays["reduce"], all_reduce, sequences)
