"""The calibrated model as an artefact: its arrays, its seed, and the hardware that it is of."""

import dataclasses
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dlrm_sharded import DataError, RunContext
from dlrm_sharded.calibration.fit_alone import LookupData, TrainablePriceNet, fit_compute
from dlrm_sharded.calibration.fit_collected import FitConfig, Fitted, fit_cost_model, predictor
from dlrm_sharded.calibration.samples import CollectedCosts, Sample, workload_of_sample
from dlrm_sharded.cost.communication import EXCHANGE_TERMS
from dlrm_sharded.cost.compute import PriceNet
from dlrm_sharded.cost.learned import LearnedCostModel, learned_cost_model
from dlrm_sharded.cost.learned_arrays import to_arrays
from dlrm_sharded.cost.price_file import read_prices, write_prices
from dlrm_sharded.hardware.artifact import write_artifact
from dlrm_sharded.hardware.hardware import Hardware
from dlrm_sharded.plans.standing import Standing
from tests.unit.hardware.made_up import HARDWARE, with_probe
from tests.unit.made_up import assert_same_arrays


@pytest.mark.parametrize("scale", [0.1, 1.0])
def test_what_is_trained_is_what_predicts(
    unseen: tuple[Sample, ...], scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The torch model of the fit, and the numpy model with the same parameters."""
    samples = [sample for sample in unseen if sample.kind == "computation"][:60]
    data = LookupData.from_samples(samples)
    generator = torch.Generator().manual_seed(0)
    trained: list[TrainablePriceNet] = []
    freeze = TrainablePriceNet.to_numpy

    def disturb_and_freeze(net: TrainablePriceNet) -> PriceNet:
        with torch.no_grad():
            for parameter in net.parameters():
                parameter += scale * torch.randn(parameter.shape, generator=generator)
        trained.append(net)
        return freeze(net)

    monkeypatch.setattr(TrainablePriceNet, "to_numpy", disturb_and_freeze)
    compute = fit_compute(data, seed=0, num_steps=2)
    predicted = []
    for sample in samples:
        workload = workload_of_sample(sample)
        sums = workload.by_rank(compute.vectors(workload))
        predicted.append(compute.times_ms(sums, workload.num_lookups()))

    scaled = (data.profile - compute.profile_mean) / compute.profile_std
    inputs = [torch.tensor(of, dtype=torch.float32) for of in (data.work, scaled, data.read_mb)]
    inputs += [torch.tensor(data.lookup), torch.tensor(data.widest, dtype=torch.float32)]
    with torch.no_grad():
        expected = torch.stack([net(*inputs) for net in trained], dim=1)
    np.testing.assert_allclose(np.concatenate(predicted), expected.numpy(), rtol=1e-5)


def test_an_artefact_is_the_model(
    model: LearnedCostModel, fitted: Fitted, unseen: tuple[Sample, ...], tmp_path: Path
) -> None:
    """Reading what was written gives what was fitted, to the last bit."""
    path = write_artifact(tmp_path, "calibrated-made_up", fitted.arrays, fitted.meta)
    loaded = learned_cost_model(RunContext(), str(path))
    assert_same_arrays(to_arrays(loaded.compute, loaded.communication), fitted.arrays)
    assert (loaded.name, loaded.ranges) == (model.name, model.ranges)
    assert loaded.measured_links == model.measured_links
    for sample in unseen[:20] + unseen[-20:]:
        workload = workload_of_sample(sample)
        assert predictor(loaded)(workload) == predictor(model)(workload)


def test_an_artefact_is_of_the_hardware_of_its_costs(costs: CollectedCosts) -> None:
    measured = dataclasses.replace(costs, manifest=costs.manifest | HARDWARE.to_meta())
    meta = fit_cost_model(measured, FitConfig(num_steps=2)).meta
    assert Hardware.from_meta(meta) == measured.hardware == HARDWARE
    damaged = dataclasses.replace(costs, manifest=costs.manifest | {"probe": 5})
    with pytest.raises(DataError, match="the manifest of the collected costs is damaged"):
        fit_cost_model(damaged, FitConfig(num_steps=2))


def known(fitted: Fitted, folder: Path, **meta: Any) -> str:
    """The fitted model as one of hardware with a fingerprint and a probe."""
    meta = fitted.meta | HARDWARE.to_meta() | meta
    return str(write_artifact(folder, "learned-known", fitted.arrays, meta))


@pytest.fixture
def of_known_hardware(fitted: Fitted, tmp_path: Path) -> str:
    return known(fitted, tmp_path)


def test_the_models_own_hardware(of_known_hardware: str, fitted: Fitted) -> None:
    model = learned_cost_model(RunContext("cpu", HARDWARE), of_known_hardware)
    held_out = fitted.meta["held_out_errors"]["plan, critical path"]["mape"] / 100
    rank_error = fitted.meta["rank_error"]
    assert 0.0 < rank_error < 0.5
    assert model.standing == Standing("calibrated", "cpu: x", error=held_out, rank_error=rank_error)
    assert_same_arrays(to_arrays(model.compute, model.communication), fitted.arrays)


def test_how_certain_prices_are_is_known_where_they_were_fitted(
    of_known_hardware: str, fitted: Fitted, tmp_path: Path
) -> None:
    here = learned_cost_model(RunContext("cpu", HARDWARE), of_known_hardware)
    np.testing.assert_array_equal(here.compute.uncertainty, fitted.arrays["uncertainty"])
    slow = with_probe(gather_gb_per_s=0.5, cached_gather_gb_per_s=0.5)
    assert (
        learned_cost_model(RunContext("cpu", slow), of_known_hardware).compute.uncertainty is None
    )
    write_prices(tmp_path / "prices.safetensors", here)
    again = read_prices(tmp_path / "prices.safetensors")
    np.testing.assert_array_equal(again.compute.uncertainty, here.compute.uncertainty)


def test_a_prior_is_scaled_by_the_probes(
    of_known_hardware: str, model: LearnedCostModel, unseen: tuple[Sample, ...]
) -> None:
    """Lookups at half the speed, and copies too, as nobody has measured exchanges here."""
    slow = with_probe(copy_gb_per_s=0.25, gather_gb_per_s=0.5, cached_gather_gb_per_s=0.5)
    slow = dataclasses.replace(slow, probe=dataclasses.replace(slow.probe, exchange=None))
    prior = learned_cost_model(RunContext("cpu", slow), of_known_hardware)
    for sample in (unseen[0], unseen[-1]):
        workload = workload_of_sample(sample)
        here, there = predictor(prior)(workload), predictor(model)(workload)
        for direction, factor in (("compute", 2), ("comm", 4)):
            for stage in (f"fwd_{direction}", f"bwd_{direction}"):
                assert here.stage_max_ms(stage) == pytest.approx(factor * there.stage_max_ms(stage))
    assert (prior.standing.kind, prior.standing.error) == ("prior", pytest.approx(3))
    assert "random gather: 0.5 x the speed of the artefact's machine" in prior.standing.reasons
    stated = EXCHANGE_TERMS.index("max_busier_inter")
    assert (prior.communication.exchange[:, stated] == 1).all(), "stated bandwidths stay"


def of_version(fitted: Fitted, tmp_path: Path, fbgemm: str | None) -> str:
    """The fitted model as one of known hardware under a version of FBGEMM."""
    versions = {} if fbgemm is None else {"fbgemm-gpu": "1.8.0+cpu", "fbgemm-gpu-cpu": fbgemm}
    return known(fitted, tmp_path, versions=versions)


@pytest.mark.parametrize(
    ("there", "here", "factor"),
    [
        ("1.8.0", "1.9.0", 1.4),
        ("1.6.0", "1.9.2+cpu", 1.4),
        (None, "1.10.0", 1.4),
        ("1.9.0", "1.8.0", 1 / 1.4),
    ],
)
def test_a_changed_kernel_scales_its_direction_and_is_said(
    fitted: Fitted, model: LearnedCostModel, tmp_path: Path, there: str, here: str, factor: float
) -> None:
    context = RunContext("cpu", HARDWARE, "rowwise_adagrad", fbgemm=here)
    changed = learned_cost_model(context, of_version(fitted, tmp_path, there))
    ones = np.ones(1)
    assert changed.compute.launch_ms(ones) == pytest.approx(
        model.compute.launch_ms(ones) * [1.0, factor]
    )
    standing = changed.standing
    assert standing.kind == "prior"
    assert standing.error == pytest.approx(abs(factor - 1), rel=0.1)
    [reason] = standing.reasons
    assert reason.startswith(f"FBGEMM {here} here, {there or '1.8.0'} there: backward computation")


def global_states() -> tuple[Any, ...]:
    return random.getstate(), repr(np.random.get_state()), torch.get_rng_state().tolist()


def test_the_seed_says_all(costs: CollectedCosts) -> None:
    """The same model again, whatever was drawn before; and nothing drawn from what others use."""

    def fit(seed: int) -> dict[str, np.ndarray]:
        before = global_states()
        arrays = fit_cost_model(costs, FitConfig(seed=seed, num_steps=5)).arrays
        assert global_states() == before
        return arrays

    first = fit(3)
    torch.rand(5)
    np.random.default_rng().random(5)
    random.random()
    assert_same_arrays(fit(3), first)
    other = fit(4)
    assert not np.array_equal(other["forward.weight_0"], first["forward.weight_0"])
