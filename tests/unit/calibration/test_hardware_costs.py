"""The costs of a run's hardware: its prior, fitted to what the store has of it."""

import dataclasses
from pathlib import Path

import pytest

from dlrm_sharded import ConfigError, RunContext
from dlrm_sharded.calibration.disturbance import Disturbance
from dlrm_sharded.calibration.hardware_costs import (
    budget_in_s,
    hardware_cost_model,
    needs_measuring,
    with_samples,
)
from dlrm_sharded.calibration.sample_store import (
    Conditions,
    SampleStore,
    conditions_of,
    sample_store,
)
from dlrm_sharded.calibration.samples import RUN, Sample
from dlrm_sharded.hardware.fingerprint import Fingerprint
from dlrm_sharded.hardware.hardware import Hardware
from tests.unit.calibration.cases import ELSEWHERE, on_other_hardware
from tests.unit.calibration.test_sample_fit import error_of
from tests.unit.cost.hardware import measured_plans
from tests.unit.hardware.synthetic import CPU
from tests.unit.synthetic import in_turns, tables_of, task_of

HERE = RunContext("cpu", Hardware("cpu: x", Fingerprint(CPU)), "rowwise_adagrad", 2)
PLANS = on_other_hardware(measured_plans(12, 4, seed=5), ELSEWHERE)
RUNS = [dataclasses.replace(plan, kind=RUN) for plan in PLANS[:12]]


def noted(
    folder: Path,
    *samples: Sample,
    conditions: Conditions | None = None,
    disturbance: Disturbance | None = None,
) -> SampleStore:
    store = sample_store(HERE, str(folder))
    for sample in samples:
        assert store.append(conditions or conditions_of(HERE), sample, disturbance)
    return store


def costs(folder: Path, context: RunContext = HERE):
    return hardware_cost_model(context, journal=str(folder))


def test_the_next_prediction_has_what_was_measured(tmp_path: Path) -> None:
    before = costs(tmp_path)
    assert (before.provenance.kind, before.provenance.num_runs) == ("prior", 0)
    assert needs_measuring(before, HERE, exchanges=True)
    noted(tmp_path, *PLANS)
    after = costs(tmp_path)
    assert not needs_measuring(after, HERE, exchanges=True)
    assert (after.name, after.provenance.hardware, after.provenance.kind) == (
        *("cpu: x", "cpu: x"),
        "measured",
    )
    assert after.provenance.reasons == ("16 plans were measured",)
    assert error_of(after) < 0.5 < error_of(before)
    elsewhere = dataclasses.replace(HERE, optimizer="adam")
    assert costs(tmp_path, elsewhere).provenance.kind == "prior", "samples with another optimizer"


def test_runs_alone_correct_a_prior(tmp_path: Path) -> None:
    """Their plans are alike, so that the hardware is measured all the same."""
    noted(tmp_path, *RUNS)
    found = costs(tmp_path)
    assert found.provenance.short_text.startswith("prior, corrected by 12 runs, within about")
    assert needs_measuring(found, HERE, exchanges=False)
    noted(tmp_path, *RUNS, disturbance=Disturbance(0.5))
    assert "24 runs, within" in costs(tmp_path).provenance.short_text, "half of them are quiet"
    noted(tmp_path, RUNS[0], disturbance=Disturbance(0.5))
    assert "25 runs, measured under load, within" in costs(tmp_path).provenance.short_text


def test_without_exchanges_no_error_is_stated(tmp_path: Path) -> None:
    alone = [dataclasses.replace(plan, kind="computation") for plan in measured_plans(8, 0, seed=6)]
    alone = [_on_one_rank(plan) for plan in alone]
    noted(tmp_path, *alone, conditions=Conditions("rowwise_adagrad", None))
    found = costs(tmp_path)
    assert found.provenance.error is None
    assert "exchanges were not measured" in found.provenance.reasons
    assert needs_measuring(found, HERE, exchanges=True)
    assert not needs_measuring(found, HERE, exchanges=False)


def _on_one_rank(plan: Sample) -> Sample:
    shards = tuple(dataclasses.replace(s, rank=0, row_wise=False) for s in plan.shards)
    cost = dataclasses.replace(
        plan.cost, per_rank=plan.cost.per_rank[:1], input_dist_ms=plan.cost.input_dist_ms[:1]
    )
    return dataclasses.replace(plan, world_size=1, ranks_per_host=1, shards=shards, cost=cost)


def test_a_sample_that_others_contradict_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = noted(tmp_path, *PLANS)
    before = costs(tmp_path)
    whole = store.path.read_text().splitlines(keepends=True)
    noted(tmp_path, *on_other_hardware(PLANS[6:7], 1e3))
    absurd = store.path.read_text().splitlines(keepends=True)[-1]
    store.path.write_text("".join([*whole[:2], absurd, *whole[2:]]))
    caplog.clear()
    assert costs(tmp_path).provenance == before.provenance
    [said] = [text for text in caplog.messages if "contradict" in text]
    assert said.startswith("1 of 17 samples of this hardware is left out")
    assert f"{store.path}:3 (" in said


def test_a_prior_of_a_gpu_is_fitted() -> None:
    """Its exchanges are curves, which are scaled like everything else."""
    context = RunContext("cuda", Hardware("NVIDIA H100 80GB HBM3"))
    prior = with_samples(context, {})
    plans = [*PLANS, *on_other_hardware(measured_plans(0, 12, seed=7), ELSEWHERE)]
    after = with_samples(context, {str(i): plan for i, plan in enumerate(plans)})
    assert error_of(after, plans) < 1.0 < error_of(prior, plans)
    task = task_of(tables_of(*[(1000, 64, 1.0)] * 2), batch_size=4096, device="cuda")
    slower, before = (model.predict(in_turns(task), task) for model in (after, prior))
    assert slower.stage_max_ms("fwd_comm") > 2 * before.stage_max_ms("fwd_comm")


def test_recognized_hardware_is_not_measured_yet() -> None:
    """The packaged costs of a machine with this name and probe are a prior all the same."""
    packaged = hardware_cost_model(RunContext("cpu"))
    known = Hardware(packaged.name)
    found = hardware_cost_model(RunContext("cpu", known, "rowwise_adagrad", 2))
    assert found.provenance.kind == "prior"
    assert found.provenance.error is None or found.provenance.error >= 0.3


def test_a_store_is_of_one_hardware(tmp_path: Path) -> None:
    store = sample_store(HERE, str(tmp_path))
    other = dataclasses.replace(CPU, instruction_sets=("avx2",))
    elsewhere = dataclasses.replace(HERE, hardware=Hardware("cpu: x", Fingerprint(other)))
    assert store != sample_store(elsewhere, str(tmp_path))
    assert store == sample_store(HERE, str(tmp_path))
    assert sample_store(HERE, None) is sample_store(HERE, "none") is None
    assert sample_store(RunContext("cpu"), "auto") is None, "the hardware is not known"
    for wrong in (7, "", "a\0b", ["x"]):
        with pytest.raises(ConfigError, match="journal"):
            sample_store(HERE, wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("calibrate", "seconds"), [("auto", 20.0), ("never", None), (5, 5.0), ("2.5", 2.5)]
)
def test_the_time_of_a_first_run(calibrate: object, seconds: float | None) -> None:
    assert budget_in_s(calibrate) == seconds


@pytest.mark.parametrize("calibrate", ["often", 0, -1.0, 1e9, None, "nan"])
def test_says_what_is_no_time(calibrate: object) -> None:
    with pytest.raises(ConfigError, match="calibrate"):
        budget_in_s(calibrate)
