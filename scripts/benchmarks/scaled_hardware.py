"""This machine as another one: what it measures, times factors of the forward and backward pass."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.made_up_hardware import factors_of
from dlrm_sharded.calibration.first_start import adapted_to
from dlrm_sharded.cost.learned import LearnedCostModel, learned_cost_model, shipped_prior
from dlrm_sharded.files.errors import ConfigError
from dlrm_sharded.fitting.calibrate import FitConfig, fit_cost_model
from dlrm_sharded.fitting.costs_file import read_costs
from dlrm_sharded.fitting.samples import Sample
from dlrm_sharded.fitting.start_file import FirstStart
from dlrm_sharded.hardware.artifact import write_artifact
from dlrm_sharded.hardware.context import RunContext
from dlrm_sharded.measuring.rank_bench import RankBench
from dlrm_sharded.plans.plan_cost import BWD_COMPUTE, FWD_COMPUTE, StageCost

STAGE_OF = {"forward": FWD_COMPUTE, "backward": BWD_COMPUTE}

Factors = Mapping[str, float]
"""Factors of measured times, by stage of computation."""


def stage_factors(kind: str) -> dict[str, float]:
    """Return the factors of a kind of hardware, such as "backward x 5.5".

    Raises:
        ConfigError: it has factors of other parts, which cannot be told apart in a measured stage.
    """
    factors = factors_of(kind)
    if other := factors.keys() - STAGE_OF:
        raise ConfigError(f"{', '.join(other)} cannot be scaled; {', '.join(STAGE_OF)} can")
    return {STAGE_OF[part]: factor for part, factor in factors.items()}


def scaled(cost: StageCost, factors: Factors) -> StageCost:
    return cost.with_stages(
        {stage: factor * cost.stage_ms(stage) for stage, factor in factors.items()}
    )


class ScaledBench(RankBench):
    """A bench on which stages take so many times as long as on this machine."""

    def __init__(self, *args: Any, factors: Factors, **keys: Any) -> None:
        super().__init__(*args, **keys)
        self._factors = factors

    def measure(self, *args: Any, **keys: Any) -> StageCost:
        return scaled(super().measure(*args, **keys), self._factors)


def scaled_start(start: FirstStart, prior: LearnedCostModel, factors: Factors) -> FirstStart:
    """Return what a first start would have measured, and how good its prices would be."""
    samples = tuple(_scaled_sample(sample, factors) for sample in start.samples)
    adapted = adapted_to(prior, samples)
    return dataclasses.replace(
        start, samples=samples, error=adapted.stated_error, rank_error=adapted.rank_error
    )


def calibrated(path: str, context: RunContext, factors: Factors) -> LearnedCostModel:
    """Return the prices of a calibration here, fitted to scaled times if it is a costs.parquet."""
    if not path.endswith(".parquet"):
        return learned_cost_model(context, path)
    costs = read_costs(path)
    samples = tuple(_scaled_sample(sample, factors) for sample in costs.samples)
    costs = dataclasses.replace(costs, samples=samples)
    fitted = fit_cost_model(costs, FitConfig(), shipped_prior(context))
    with tempfile.TemporaryDirectory() as folder:
        file = write_artifact(Path(folder), "scaled", fitted.arrays, fitted.meta)
        return learned_cost_model(context, str(file))


def _scaled_sample(sample: Sample, factors: Factors) -> Sample:
    ranks = tuple(scaled(cost, factors) for cost in sample.cost.per_rank)
    return dataclasses.replace(sample, cost=dataclasses.replace(sample.cost, per_rank=ranks))
