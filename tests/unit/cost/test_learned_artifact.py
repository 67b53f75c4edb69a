"""The calibrated model as an artifact: its arrays, its seed, and the hardware that it is of."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from dlrm_sharded import RunContext
from dlrm_sharded.calibration.priors import learned_cost_model
from dlrm_sharded.calibration.samples import Sample, workload_of_sample
from dlrm_sharded.cost.exchange_terms import EXCHANGE_TERMS
from dlrm_sharded.cost.learned import LearnedCostModel
from dlrm_sharded.cost.learned_arrays import learned_features, to_arrays
from dlrm_sharded.files.errors import DataError
from dlrm_sharded.hardware.artifact import Arrays, write_artifact
from dlrm_sharded.plans.cost_provenance import CostProvenance
from tests.unit.hardware.synthetic import HARDWARE, with_probe
from tests.unit.synthetic import assert_same_arrays


def fitted(model: LearnedCostModel) -> tuple[Arrays, dict[str, Any]]:
    """The content of the artifact of a model."""
    meta = {
        "kind": "learned",
        "device": "cpu",
        "cores": 2,
        "optimizer": "rowwise_adagrad",
        "features": learned_features("cpu"),
        "ranges": model.ranges,
        "measured_links": list(model.measured_links),
        "held_out_errors": {"plan, critical path": {"mape": 6.0}},
        "rank_error": 0.1,
    }
    return to_arrays(model.compute, model.communication), meta


@pytest.fixture
def of_known_hardware(model: LearnedCostModel, tmp_path: Path) -> str:
    """The model as one of hardware with a fingerprint and a probe."""
    arrays, meta = fitted(model)
    return str(write_artifact(tmp_path, "learned-known", arrays, meta | HARDWARE.to_meta()))


def test_the_models_own_hardware(of_known_hardware: str, model: LearnedCostModel) -> None:
    """Reading what was written gives what was fitted, to the last bit."""
    found = learned_cost_model(RunContext("cpu", HARDWARE), of_known_hardware)
    assert found.provenance == CostProvenance("calibrated", "cpu: x", error=0.06, rank_error=0.1)
    arrays, _ = fitted(model)
    assert_same_arrays(to_arrays(found.compute, found.communication), arrays)
    assert (found.ranges, found.measured_links) == (model.ranges, model.measured_links)


@pytest.mark.parametrize("name", ["exchange", "reduce", "all_reduce"])
def test_lines_of_another_shape_are_refused(
    name: str, model: LearnedCostModel, tmp_path: Path
) -> None:
    """Only plans with row blocks or replicas use some of them, and would be the first to fail."""
    arrays, meta = fitted(model)
    arrays[name] = arrays[name][..., :-1]
    path = write_artifact(tmp_path, f"learned-short_{name}", arrays, meta | HARDWARE.to_meta())
    with pytest.raises(DataError, match="is no usable cost model"):
        learned_cost_model(RunContext("cpu", HARDWARE), str(path))


def test_a_prior_is_scaled_by_the_probes(
    of_known_hardware: str, model: LearnedCostModel, unseen: tuple[Sample, ...]
) -> None:
    """Lookups at half the speed, and copies too, as nobody has measured exchanges here."""
    slow = with_probe(copy_gb_per_s=0.25, gather_gb_per_s=0.5, cached_gather_gb_per_s=0.5)
    slow = dataclasses.replace(slow, probe=dataclasses.replace(slow.probe, exchange=None))
    prior = learned_cost_model(RunContext("cpu", slow), of_known_hardware)
    for sample in (unseen[0], unseen[-1]):
        workload = workload_of_sample(sample)
        here, there = (of.predict_workload(workload, sample.hosts) for of in (prior, model))
        for direction, factor in (("compute", 2), ("comm", 4)):
            for stage in (f"fwd_{direction}", f"bwd_{direction}"):
                assert here.stage_max_ms(stage) == pytest.approx(factor * there.stage_max_ms(stage))
    assert (prior.provenance.kind, prior.provenance.error) == ("prior", pytest.approx(3))
    assert "random gather: 0.5 x the speed of the artifact's machine" in prior.provenance.reasons
    stated = EXCHANGE_TERMS.index("max_busier_inter")
    assert (prior.communication.exchange[:, stated] == 1).all(), "stated bandwidths stay"
