"""`dlrm-calibrate costs=FILE`: an artefact, or one message and an exit code."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from dlrm_sharded import DataError, RunContext
from dlrm_sharded.calibration.adapt import error_of
from dlrm_sharded.calibration.costs_file import read_costs, write_costs
from dlrm_sharded.calibration.fit_collected import FitConfig, fit_cost_model, fit_learned
from dlrm_sharded.calibration.from_prior import adapted
from dlrm_sharded.calibration.samples import CollectedCosts, Sample
from dlrm_sharded.cost.learned import KIND, learned_cost_model, shipped_prior
from dlrm_sharded.cost.learned_arrays import learned_features, to_arrays
from dlrm_sharded.hardware.artifact import read_artifact
from dlrm_sharded.hardware.artifact_kinds import cost_model_kind
from tests import preloaded
from tests.unit.cost.hardware import MANIFEST, measured_plans
from tests.unit.made_up import assert_same_arrays

FIT = ("-m", "dlrm_sharded.commands.calibrate", "costs=costs.parquet")
QUICK = FitConfig(num_steps=20)


def fit(folder: Path, *overrides: str) -> tuple[int, str]:
    done = preloaded.run(*FIT, *overrides, cwd=folder)
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def collected() -> tuple[Sample, ...]:
    return measured_plans(110, 55, seed=2)


def test_writes_an_artefact(collected: tuple[Sample, ...], tmp_path: Path) -> None:
    write_costs(tmp_path / "costs.parquet", collected, MANIFEST)
    steps = f"fit.num_steps={QUICK.num_steps}"
    code, said = fit(tmp_path, "out=fitted", "fit.from_prior=false", steps)
    assert code == 0, said
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["costs.json", "costs.parquet", "fitted"]
    path = tmp_path / "fitted" / "learned-made_up.safetensors"
    assert str(path.relative_to(tmp_path)) in said
    assert "| computation, groups |" in said

    loaded = learned_cost_model(RunContext(), str(path))
    expected = fit_cost_model(read_costs(tmp_path / "costs.parquet"), QUICK)
    assert_same_arrays(to_arrays(loaded.compute, loaded.communication), expected.arrays)
    written = read_artifact(path, kind=cost_model_kind(KIND), features=learned_features).meta
    assert written["held_out_errors"] == expected.meta["held_out_errors"]
    assert written["optimizer"] == MANIFEST["optimizer"]


@pytest.mark.parametrize(
    ("computation", "communication", "message"),
    [
        (99, 55, "99 plans of computation, a fit needs 100"),
        (110, 49, "49 plans of communication, a fit needs 50"),
    ],
    ids=["computation", "communication"],
)
def test_too_few_plans(
    collected: tuple[Sample, ...], computation: int, communication: int, message: str
) -> None:
    few = collected[:computation] + collected[110 : 110 + communication]
    with pytest.raises(DataError, match=message):
        fit_cost_model(CollectedCosts(few, MANIFEST), QUICK)


@pytest.mark.parametrize("stage", ["fwd_comm_ms", "bwd_compute_ms"])
def test_a_time_of_nothing(collected: tuple[Sample, ...], stage: str) -> None:
    """A clock may say 0 ms, which `read_costs` allows: a model or a message, but no crash."""
    first = collected[0]
    ranks = [dataclasses.replace(rank, **{stage: 0.0}) for rank in first.cost.per_rank]
    cost = dataclasses.replace(first.cost, per_rank=tuple(ranks))
    nothing = dataclasses.replace(first, cost=cost)
    try:
        model = fit_learned([nothing, *collected[1:]], MANIFEST, QUICK)
    except DataError:
        return
    arrays = to_arrays(model.compute, model.communication)
    assert all(np.isfinite(array).all() for array in arrays.values())


def test_says_what_is_wrong(collected: tuple[Sample, ...], tmp_path: Path) -> None:
    write_costs(tmp_path / "costs.parquet", collected[:30], MANIFEST)
    code, output = fit(tmp_path, "out=fitted", "fit.from_prior=false")
    assert code == 2, output
    assert "30 plans of computation, a fit needs 100" in output
    assert "measure for longer: `dlrm-calibrate minutes=10`" in output
    assert "Traceback" not in output
    assert not (tmp_path / "fitted").exists()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("minutes=3", "minutes=3 has no effect: costs are given, and nothing is measured"),
        ("collect.seed=1", "collect.seed=1 has no effect: costs are given"),
        ("fit=null", "fit is null, and costs are given, and nothing is measured"),
        ("policies=maybe", "policies is 'maybe', must be true or false"),
        ("costs=", "costs is '', must be a path"),
    ],
)
def test_what_has_no_effect_is_refused(override: str, message: str, tmp_path: Path) -> None:
    code, output = fit(tmp_path, override)
    assert code == 2, output
    assert output.count("error: ") == 1
    assert message in output


def test_few_plans_move_the_packaged_model(collected: tuple[Sample, ...], tmp_path: Path) -> None:
    write_costs(tmp_path / "costs.parquet", collected[:30] + collected[110:125], MANIFEST)
    code, said = fit(tmp_path, "out=fitted")
    assert code == 0, said
    path = tmp_path / "fitted" / "learned-made_up.safetensors"
    moved = learned_cost_model(RunContext(), str(path))
    packaged = shipped_prior(RunContext())
    unseen = [*collected[30:110], *collected[125:]]
    assert error_of(moved, unseen) < 0.3 < 1.0 < error_of(packaged, unseen)
    meta = read_artifact(path, kind=cost_model_kind(KIND), features=learned_features).meta
    assert meta["hardware"] == MANIFEST["hardware"]
    assert meta["num_plans"]["fitted"] + meta["num_plans"]["held_out"] == 45


def test_takes_the_better_of_the_prior_and_a_fit_alone(collected: tuple[Sample, ...]) -> None:
    """The prior is of other hardware in every price, so that only a fit alone can be right."""
    prior = shipped_prior(RunContext())
    config = FitConfig(num_steps=300)
    chosen = fit_learned(collected, MANIFEST, config, prior)
    unseen = measured_plans(60, 20, seed=9)
    assert error_of(chosen, unseen) <= 1.2 * error_of(adapted(prior, collected), unseen)
    assert error_of(chosen, unseen) < 0.15
