"""A file has a cost model to the bit, and a sweep makes one of them."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from dlrm_sharded.calibration.factor_fit import Factors
from dlrm_sharded.calibration.hardware_costs import hardware_cost_model
from dlrm_sharded.calibration.observed import OF_SEQUENCES
from dlrm_sharded.calibration.priors import learned_cost_model
from dlrm_sharded.calibration.sample_store import conditions_of, sample_store
from dlrm_sharded.cost.communication import EXCHANGE_PARTS, EXCHANGES
from dlrm_sharded.cost.cost_model_file import (
    cost_model_beside,
    costs_digest,
    read_cost_model,
    write_cost_model,
)
from dlrm_sharded.cost.features import PROFILE
from dlrm_sharded.cost.learned import LearnedCostModel
from dlrm_sharded.files.errors import DataError
from dlrm_sharded.hardware.context import RunContext
from dlrm_sharded.hardware.fingerprint import Fingerprint
from dlrm_sharded.hardware.hardware import Hardware
from dlrm_sharded.plans.cost_provenance import CostProvenance
from dlrm_sharded.plans.plan_cost import DIRECTIONS
from dlrm_sharded.sharders.heuristics import RandomSharder
from dlrm_sharded.testing import small_tasks
from tests.unit.cost.hardware import measured_plans
from tests.unit.hardware.synthetic import CPU

HERE = RunContext("cpu", Hardware("cpu: x", Fingerprint(CPU)), "rowwise_adagrad", 2)
H100 = RunContext("cuda", Hardware("NVIDIA H100 80GB HBM3"), "rowwise_adagrad", 8)


def corrected(context: RunContext) -> LearnedCostModel:
    """A model with factors such as measured runs decide."""
    model = learned_cost_model(context)
    rng = np.random.default_rng(0)
    num_terms = len(model.compute.device.terms)
    sizes = dict.fromkeys(DIRECTIONS, model.compute.num_parts)
    sizes |= dict.fromkeys(EXCHANGES, len(EXCHANGE_PARTS))
    shapes = dict.fromkeys(DIRECTIONS, (num_terms, len(PROFILE)))
    shapes |= dict.fromkeys(EXCHANGES, (1, OF_SEQUENCES.shape[1]))
    factors = Factors(
        {name: rng.uniform(0.5, 2.0, size) for name, size in sizes.items()},
        {name: rng.normal(0.0, 0.3, shape) for name, shape in shapes.items()},
    )
    provenance = CostProvenance("prior", "synthetic", ("other",), num_runs=3, error=0.25)
    return dataclasses.replace(factors.applied(model), provenance=provenance)


@pytest.mark.parametrize("context", [HERE, H100], ids=["cpu", "h100"])
def test_predicts_the_same_times(context: RunContext, tmp_path: Path) -> None:
    model, path = corrected(context), tmp_path / "prices.safetensors"
    write_cost_model(path, model)
    read = read_cost_model(path)
    costlier = dataclasses.replace(model, compute=model.compute.scaled(1.0, 1.001))
    assert costs_digest(read) == costs_digest(model) != costs_digest(costlier)
    assert (read.provenance, read.correction) == (model.provenance, model.correction)
    task = small_tasks()["w3-mixed"]
    plan = RandomSharder(seed=0).shard(task)
    assert read.predict(plan, task) == model.predict(plan, task)


def test_is_no_fitted_model_and_no_fitted_model_is_one(tmp_path: Path) -> None:
    path = tmp_path / "prices.safetensors"
    write_cost_model(path, learned_cost_model(HERE))
    with pytest.raises(DataError, match="not a cost model of the kind 'learned'"):
        learned_cost_model(HERE, str(path))
    assert costs_digest(hardware_cost_model(HERE, str(path))) == costs_digest(read_cost_model(path))


def test_jobs_of_a_sweep_share_the_cost_model_of_the_first(tmp_path: Path) -> None:
    def of_job(context: RunContext) -> str:
        journal, snapshot = str(tmp_path / "journal"), str(tmp_path / "prices")
        return costs_digest(hardware_cost_model(context, journal=journal, snapshot=snapshot))

    first = of_job(HERE)
    journal, conditions = sample_store(HERE, str(tmp_path / "journal")), conditions_of(HERE)
    assert journal is not None
    assert conditions is not None
    for run in measured_plans(3, 0, seed=5):
        journal.append(conditions, dataclasses.replace(run, kind="run"))
    assert of_job(HERE) == first
    assert of_job(dataclasses.replace(HERE, ranks_per_host=1)) == first  # other runs correct it
    assert len(list((tmp_path / "prices").glob("*.safetensors"))) == 2
    assert costs_digest(hardware_cost_model(HERE, journal=str(tmp_path / "journal"))) != first


def test_gpus_that_share_a_snapshot_have_costs_of_their_own(tmp_path: Path) -> None:
    models = [
        hardware_cost_model(
            dataclasses.replace(H100, hardware=Hardware(name)), snapshot=str(tmp_path)
        )
        for name in ("NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB")
    ]
    assert [model.name for model in models] == ["NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB"]


@pytest.mark.parametrize(
    ("plan", "file"), [("plan.json", "prices.safetensors"), ("b.json", "b.prices.safetensors")]
)
def test_lies_beside_the_plan(plan: str, file: str, tmp_path: Path) -> None:
    assert cost_model_beside(tmp_path / plan) == tmp_path / file
