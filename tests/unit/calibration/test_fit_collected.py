"""`dlrm-calibrate costs=FILE`: a file with a model, or one message and an exit code."""

from pathlib import Path

import pytest

from dlrm_sharded import DataError
from dlrm_sharded.calibration.costs_file import write_costs
from dlrm_sharded.calibration.fit_collected import FitConfig, fit_collected
from dlrm_sharded.calibration.samples import CollectedCosts, Sample
from dlrm_sharded.cost.price_file import read_prices
from tests import preloaded
from tests.unit.calibration.test_sample_fit import error_of
from tests.unit.cost.hardware import MANIFEST, measured_plans

FIT = ("-m", "dlrm_sharded.commands.calibrate", "costs=costs.parquet")


def fit(folder: Path, *overrides: str) -> tuple[int, str]:
    done = preloaded.run(*FIT, *overrides, cwd=folder)
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def collected() -> tuple[Sample, ...]:
    return measured_plans(40, 20, seed=2)


def test_writes_a_model(collected: tuple[Sample, ...], tmp_path: Path) -> None:
    write_costs(tmp_path / "costs.parquet", collected, MANIFEST)
    code, said = fit(tmp_path, "out=fitted")
    assert code == 0, said
    path = tmp_path / "fitted" / "prices-made_up.safetensors"
    assert str(path.relative_to(tmp_path)) in said
    assert "| plan, critical path | 40 |" in said
    model = read_prices(path)
    assert model.standing.kind == "calibrated"
    assert error_of(model, measured_plans(12, 0, seed=9)) < model.standing.error + 0.1


@pytest.mark.parametrize(("model", "num"), [("learned", 9), ("neuroshard", 39)])
def test_too_few_plans(collected: tuple[Sample, ...], model: str, num: int, tmp_path: Path) -> None:
    few = CollectedCosts(collected[:num], MANIFEST)
    with pytest.raises(DataError, match=f"{num} plans of computation.*minutes=10"):
        fit_collected(few, FitConfig(model=model, num_steps=1), tmp_path)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("minutes=3", "minutes=3 has no effect: costs are given, and nothing is measured"),
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
