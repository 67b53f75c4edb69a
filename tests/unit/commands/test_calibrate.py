"""The steps of a calibration, and what is done about policies after it."""

import os
import subprocess
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from dlrm_sharded.calibration.collect import CollectConfig
from dlrm_sharded.calibration.costs_file import write_costs
from dlrm_sharded.commands import calibrate
from dlrm_sharded.commands.calibrate import MODULE, hydra_main
from dlrm_sharded.ranks.process import LAUNCHER_VARIABLE
from tests.unit.cost.hardware import MANIFEST, measured_plans

Commands = list[tuple[str, list[str]]]
ARTEFACT = Path("calibration/prices-made_up.safetensors")
RETUNED = ["init_from=packaged", "costs=predicted", "schedule.num_rounds=3", "optimizer=adam"]
QUICK = ("fit.seed=1",)


def measured(out: Path, num_plans: int = 110) -> None:
    """Write what a collection would have measured."""
    out.parent.mkdir(exist_ok=True)
    write_costs(out, measured_plans(num_plans, 55, seed=2), {**MANIFEST, "optimizer": "adam"})


@pytest.fixture
def commands(composed, monkeypatch: pytest.MonkeyPatch) -> Commands:
    """Note the commands instead of running them; the one that measures leaves a file."""
    started: Commands = []

    def note(module: str, overrides: Sequence[str]) -> int:
        started.append((module.rpartition(".")[2], [*overrides]))
        if module == MODULE:
            measured(ARTEFACT.with_name("costs.parquet"))
        return 0

    monkeypatch.setattr(calibrate, "_run", note)
    monkeypatch.setattr("sys.argv", ["dlrm-calibrate", "minutes=1"])
    monkeypatch.delenv("RANK", raising=False)
    return started


def run(composed, *overrides: str) -> int | str | None:
    with pytest.raises(SystemExit) as ended:
        hydra_main(composed("calibrate", *overrides))
    return ended.value.code


def test_measures_fits_and_offers_policies(commands, composed, capsys):
    assert run(composed, *QUICK) == 0
    assert commands == [("calibrate", ["minutes=1", "fit=null"])]
    assert ARTEFACT.exists()
    offered = f"dlrm-train-policy policy=dreamshard {' '.join(RETUNED)}; with policies=true"
    assert offered in capsys.readouterr().out


def test_retunes_both_policies(commands, composed):
    assert run(composed, *QUICK, "policies=true") == 0
    assert commands[1:] == [
        ("train_policy", [f"policy={policy}", *RETUNED]) for policy in ("autoshard", "dreamshard")
    ]


def test_costs_of_before_are_fitted_and_nothing_is_measured(commands, composed):
    measured(Path("costs.parquet"))
    fit = (*QUICK, "costs=costs.parquet", "out=elsewhere", "policies=true")
    assert run(composed, *fit) == 0
    path = f"elsewhere/{ARTEFACT.name}"
    assert Path(path).exists()
    elsewhere = [f'cost_model.artifact="{path}"', 'out="elsewhere"']
    assert commands[0] == ("train_policy", ["policy=autoshard", *RETUNED, *elsewhere])


def test_the_published_networks_are_fitted_and_no_policy_to_them(
    commands, composed, capsys, caplog
):
    measured(Path("costs.parquet"))
    fit = (*QUICK, "costs=costs.parquet", "fit.model=neuroshard")
    assert run(composed, *fit) == 0
    assert list(Path("calibration").glob("neuroshard-*"))
    assert commands == []
    assert "policy" not in capsys.readouterr().out
    assert run(composed, *fit, "policies=true") == 2
    assert "policies are re-tuned to a model of fit.model=learned" in caplog.text


@pytest.fixture
def collections(monkeypatch: pytest.MonkeyPatch) -> list[CollectConfig]:
    """Note the settings of the collections of ranks, which measure nothing."""
    noted: list[CollectConfig] = []

    def collect(config: CollectConfig, out: Path, rank: object) -> None:
        assert not out.exists()
        noted.append(config)
        measured(out)

    rank = SimpleNamespace(is_zero=True)
    monkeypatch.setattr(calibrate, "process_group", lambda timeout_s: nullcontext(rank))
    monkeypatch.setattr(calibrate, "all_or_none", nullcontext)
    monkeypatch.setattr(calibrate, "collect", collect)
    return noted


@pytest.mark.parametrize("rank", ["0", "1"])
def test_all_ranks_measure_and_one_does_the_rest(
    commands, collections, composed, monkeypatch, rank
):
    monkeypatch.setenv("RANK", rank)
    measured(ARTEFACT.with_name("costs.parquet"))
    if rank == "0":
        assert run(composed, *QUICK, "policies=true") == 0
    else:
        hydra_main(composed("calibrate", *QUICK, "policies=true"))
    assert len(collections) == 1
    assert ARTEFACT.exists() == (rank == "0")
    assert len(commands) == (2 if rank == "0" else 0)


@pytest.mark.parametrize(
    ("minutes", "budget_s", "iterations", "repeat_every"),
    [("0.5", 30, 8, 10), ("2", 90, 8, 10), ("10", 570, 20, 19)],
)
def test_time_decides_how_plans_are_measured(
    commands, collections, composed, monkeypatch, minutes, budget_s, iterations, repeat_every
):
    monkeypatch.setenv("RANK", "0")
    hydra_main(composed("calibrate", f"minutes={minutes}", "fit=null"))
    [config] = collections
    assert config.time_budget_s == budget_s
    assert (config.measure.iterations, config.repeat_every) == (iterations, repeat_every)
    assert config.optimizer == "rowwise_adagrad"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("policies=dreamshard", "policies is 'dreamshard', must be true or false"),
        ("minutes=0", "minutes is 0, must be a number > 0"),
        ("num_ranks=0", "num_ranks is 0"),
        ("fit.model=other", "fit.model is 'other'; known: learned, neuroshard"),
    ],
)
def test_what_cannot_be_used_is_said_before_anything_is_measured(
    commands, composed, caplog, override, message
):
    assert run(composed, override) == 2
    assert message in caplog.text
    assert commands == []


@pytest.mark.parametrize("step", ["measuring", "fitting"])
def test_no_policies_after_an_error(commands, composed, monkeypatch, step):
    def fail(module: str, overrides: Sequence[str]) -> int:
        commands.append((module, [*overrides]))
        measured(ARTEFACT.with_name("costs.parquet"), num_plans=5)
        return 3 if step == "measuring" else 0

    monkeypatch.setattr(calibrate, "_run", fail)
    assert run(composed, *QUICK, "policies=true") == (3 if step == "measuring" else 2)
    assert [module for module, _ in commands] == [MODULE]


def test_its_commands_die_with_it_and_are_no_ranks_of_its_job(monkeypatch):
    """They would otherwise go on measuring; test_hydra_app has their side of it."""
    environments: list[dict[str, str]] = []

    def note(*_: object, env: dict[str, str], check: bool) -> SimpleNamespace:
        environments.append(env)
        return SimpleNamespace(returncode=int(check))

    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(subprocess, "run", note)
    assert calibrate._run(MODULE, []) == 0
    assert environments[0][LAUNCHER_VARIABLE] == str(os.getpid())
    assert "RANK" not in environments[0]
