"""The steps of a calibration, and what is done about policies after it."""

import contextlib
from pathlib import Path
from typing import Any

import pytest

from dlrm_sharded import RunContext
from dlrm_sharded.calibration.disturbance import Disturbance
from dlrm_sharded.calibration.hardware_costs import hardware_cost_model
from dlrm_sharded.commands import calibrate
from dlrm_sharded.commands.exit_codes import exit_codes
from dlrm_sharded.cost.cost_model_file import read_cost_model
from dlrm_sharded.hardware.fingerprint import Fingerprint
from dlrm_sharded.hardware.hardware import Hardware
from dlrm_sharded.ranks.distributed import Rank
from tests.unit.calibration.costs_of_02 import write_costs
from tests.unit.cost.hardware import MANIFEST, measured_plans
from tests.unit.hardware.synthetic import CPU

HERE = RunContext("cpu", Hardware("cpu: synthetic", Fingerprint(CPU)), "rowwise_adagrad", 2)
WRITTEN = "prices-cpu_synthetic.safetensors"
SAMPLES = measured_plans(30, 0, seed=2)


@pytest.fixture(autouse=True)
def no_rank(composed: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["dlrm-calibrate", "minutes=1"])
    monkeypatch.delenv("RANK", raising=False)


@pytest.fixture
def first_numbers(monkeypatch: pytest.MonkeyPatch, rank: Rank) -> list[int]:
    """Let the only rank of a job measure 15 plans; note the numbers of the first ones."""
    noted: list[int] = []

    def collect(rank: Rank, note: Any, *, first: int, **options: Any) -> None:
        assert options["budget_s"] == 30.0
        noted.append(first)
        for sample in SAMPLES[first : first + 15]:
            note(sample, Disturbance())

    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(calibrate, "process_group", lambda **_: contextlib.nullcontext(rank))
    monkeypatch.setattr(calibrate, "context_of_job", lambda *_: HERE)
    monkeypatch.setattr(calibrate, "collect", collect)
    return noted


def run(composed, *overrides: str) -> int | str | None:
    try:
        with exit_codes():
            calibrate.calibrate(composed("calibrate", *overrides))
    except SystemExit as ended:
        return ended.code
    return 0


def test_starts_ranks_which_do_the_rest(composed, monkeypatch):
    launched: list[list[str]] = []
    monkeypatch.setattr(calibrate, "launch", lambda words: launched.append(words) or 3)
    assert run(composed, "num_ranks=2") == 3
    assert launched == [["--nproc-per-node", "2", "-m", calibrate.MODULE, "minutes=1"]]


def test_each_call_goes_on_and_fits_the_samples_of_all(first_numbers, composed, caplog):
    caplog.set_level("INFO")
    for num_samples in (15, 30):
        assert run(composed, "journal=store", "minutes=0.5") == 0
        assert f"fitted {num_samples} samples" in caplog.text
    assert first_numbers == [0, 15]
    offered = "policy=dreamshard init_from=packaged costs=predicted schedule.num_rounds=3 "
    assert f"{offered}optimizer.embedding=rowwise_adagrad cost_model.artifact='calib" in caplog.text
    written = read_cost_model(Path("calibration", WRITTEN))
    assert written.provenance.kind == "calibrated"
    assert hardware_cost_model(HERE, journal="store").provenance.error == written.provenance.error


def test_costs_of_02_are_fitted_and_nothing_is_measured(composed, caplog):
    caplog.set_level("INFO")
    write_costs(Path("costs.parquet"), SAMPLES, {**MANIFEST, "optimizer": "adam"})
    assert run(composed, "costs=costs.parquet", "out=elsewhere") == 0
    assert len([*Path("elsewhere").iterdir()]) == 1
    assert "optimizer.embedding=adam cost_model.artifact='elsewhere/" in caplog.text


def test_the_published_networks_are_fitted_and_no_policy_to_them(composed, caplog):
    write_costs(Path("costs.parquet"), measured_plans(110, 55, seed=2), MANIFEST)
    fit = ("costs=costs.parquet", "architecture=neuroshard", "num_steps=2")
    assert run(composed, *fit) == 0
    assert list(Path("calibration").glob("neuroshard-*"))
    assert "policy" not in caplog.text


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("minutes=0", "minutes is 0; it must be a number > 0"),
        ("num_ranks=0", "num_ranks is 0"),
        ("architecture=other", "architecture is 'other'; known: learned, neuroshard"),
        ("seed=-1", "seed is -1"),
        ("num_steps=0", "num_steps is 0"),
        ("batch_sizes=[64,0]", "a size in batch_sizes is 0"),
        ("optimizer.embedding=adamw", "optimizer.embedding is 'adamw'; known: sgd, rowwise_"),
        ("costs=none.parquet", "none.parquet and none.json cannot be used"),
    ],
)
def test_what_cannot_be_used_is_said_before_anything_is_measured(
    composed, monkeypatch, caplog, override, message
):
    monkeypatch.setattr(calibrate, "launch", pytest.fail)
    assert run(composed, override) == 2
    assert message in caplog.text


@pytest.mark.parametrize("num_plans", [0, 2])
def test_too_few_plans_are_not_fitted(first_numbers, composed, monkeypatch, caplog, num_plans):
    monkeypatch.setitem(globals(), "SAMPLES", SAMPLES[:num_plans])
    assert run(composed, "journal=store", "minutes=0.5") == 2
    assert f"{num_plans} plans of computation were measured, and a fit needs 3" in caplog.text


def test_a_store_is_needed(first_numbers, composed, caplog):
    assert run(composed, "journal=none", "minutes=0.5") == 2
    assert "journal is none, so samples have no place" in caplog.text
