"""The cost model of a run, before and after runs on its hardware."""

import dataclasses
from pathlib import Path

import pytest

from dlrm_sharded import ConfigError, RunContext
from dlrm_sharded.calibration.adapt import error_of
from dlrm_sharded.calibration.hardware_costs import (
    conditions_of,
    corrected,
    hardware_cost_model,
    run_journal,
)
from dlrm_sharded.calibration.sample_store import SampleStore
from dlrm_sharded.calibration.samples import Sample
from dlrm_sharded.cost.learned import LearnedCostModel, learned_cost_model
from dlrm_sharded.hardware.fingerprint import Fingerprint
from dlrm_sharded.hardware.hardware import Hardware
from dlrm_sharded.plans.standing import Standing
from tests.unit.calibration.test_adapt import ELSEWHERE, on_other_hardware
from tests.unit.cost.hardware import measured_plans
from tests.unit.hardware.made_up import CPU
from tests.unit.made_up import in_turns, tables_of, task_of

HERE = RunContext("cpu", Hardware("cpu: x", Fingerprint(CPU)), "rowwise_adagrad", 2)


@pytest.fixture(scope="module")
def prior(model: LearnedCostModel) -> LearnedCostModel:
    return dataclasses.replace(model, standing=Standing("prior", "made up", ("other",), error=0.5))


RUNS = on_other_hardware(measured_plans(12, 0, seed=5), ELSEWHERE)


def noted(folder: Path, *runs: Sample) -> SampleStore:
    journal, conditions = run_journal(HERE, str(folder)), conditions_of(HERE)
    for run in runs:
        assert journal.append(conditions, run)
    return journal


def test_without_runs_it_is_the_prior(prior: LearnedCostModel) -> None:
    assert corrected(prior, []) is prior


@pytest.mark.parametrize(("num", "words"), [(1, "1 run"), (12, "12 runs")])
def test_says_how_many_runs_corrected_it(prior: LearnedCostModel, num: int, words: str) -> None:
    standing = corrected(prior, RUNS[:num]).standing
    assert standing.short_text.startswith(f"prior, corrected by {words}, within about")
    assert num == 1 or standing.error < 0.2


def test_is_never_worse_than_the_prior_on_the_runs(
    prior: LearnedCostModel, caplog: pytest.LogCaptureFixture
) -> None:
    """Runs that contradict each other: the same plan was five times faster, and slower."""
    plan = measured_plans(1, 0, seed=6)
    fast, slow = on_other_hardware(plan, 0.2), on_other_hardware(plan, 5.0)
    with caplog.at_level("INFO"):
        assert corrected(prior, [*fast, *slow] * 3) is prior
    assert "earlier runs (6) on this hardware do not correct the cost model" in caplog.text


def test_noise_does_not_correct_a_calibrated_model(prior: LearnedCostModel) -> None:
    """Whose stated error may be larger than what the runs of the journal differ by."""
    calibrated = dataclasses.replace(prior, standing=Standing("calibrated", "made up", error=0.5))
    runs = []
    for plan, factor in zip(measured_plans(4, 0, seed=7), (1.1, 0.9, 1.1, 0.9), strict=True):
        runs += on_other_hardware([plan], factor)
    assert corrected(calibrated, runs) is calibrated
    assert corrected(prior, runs) is not prior


def test_a_journal_is_of_one_hardware(tmp_path: Path) -> None:
    journal = run_journal(HERE, str(tmp_path))
    other = dataclasses.replace(CPU, instruction_sets=("avx2",))
    elsewhere = dataclasses.replace(HERE, hardware=Hardware("cpu: x", Fingerprint(other)))
    assert journal != run_journal(elsewhere, str(tmp_path))
    assert journal == run_journal(HERE, str(tmp_path))


@pytest.mark.parametrize("journal", [None, "none"])
def test_there_need_be_no_journal(journal: str | None) -> None:
    assert run_journal(HERE, journal) is None
    assert run_journal(RunContext("cpu"), "auto") is None, "the hardware is not known"


@pytest.mark.parametrize("journal", [7, "", "a\0b", ["x"]])
def test_says_what_is_no_folder(journal: object) -> None:
    with pytest.raises(ConfigError, match="journal"):
        run_journal(HERE, journal)  # type: ignore[arg-type]


def test_the_next_prediction_is_corrected(tmp_path: Path) -> None:
    before = hardware_cost_model(HERE, journal=str(tmp_path))
    noted(tmp_path, *on_other_hardware(RUNS, 40.0))
    after = hardware_cost_model(HERE, journal=str(tmp_path))
    assert after.standing.num_runs == len(RUNS)
    assert after.compute.forward.launch_ms > before.compute.forward.launch_ms
    other_optimizer = dataclasses.replace(HERE, optimizer="adam")
    standing = hardware_cost_model(other_optimizer, journal=str(tmp_path)).standing
    assert standing.num_runs == 0, "runs with another optimizer"


def test_a_run_that_others_contradict_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    journal = noted(tmp_path, *RUNS[:6])
    before = hardware_cost_model(HERE, journal=str(tmp_path))
    whole = journal.path.read_text().splitlines(keepends=True)
    noted(tmp_path, *on_other_hardware(RUNS[6:7], 1e3))
    absurd = journal.path.read_text().splitlines(keepends=True)[-1]
    journal.path.write_text("".join([*whole[:2], absurd, *whole[2:]]))
    caplog.clear()
    after = hardware_cost_model(HERE, journal=str(tmp_path))
    assert after.standing == before.standing
    [said] = [text for text in caplog.messages if "contradict" in text]
    assert f"1 of 7 runs in the journal {journal.path} is left out" in said
    assert "line 3 (" in said
    corrected(before, [*RUNS[:6], *on_other_hardware(RUNS[6:7], 1e3)])
    assert "contradict: run 7 (" in caplog.text


def test_runs_correct_the_prior_of_a_gpu() -> None:
    """Its exchanges are curves, which are scaled like everything else."""
    gpu = learned_cost_model(RunContext("cuda", Hardware("NVIDIA H100 80GB HBM3")))
    exchanging = on_other_hardware(measured_plans(0, 12, seed=7), ELSEWHERE)
    after = corrected(gpu, [*RUNS, *exchanging])
    assert after.standing.num_runs == len(RUNS) + len(exchanging)
    assert error_of(after, RUNS) < 1.0 < error_of(gpu, RUNS)
    assert error_of(after, exchanging) < 0.5 < error_of(gpu, exchanging)
    task = task_of(tables_of(*[(1000, 64, 1.0)] * 2), batch_size=4096, device="cuda")
    slower, prior = (model.predict(in_turns(task), task) for model in (after, gpu))
    assert slower.stage_max_ms("fwd_comm") > 2 * prior.stage_max_ms("fwd_comm")
