"""The steps of a calibration, and what is done about policies after it."""

import os
import subprocess
from collections.abc import Sequence
from types import SimpleNamespace

import pytest

from dlrm_sharded.commands import calibrate
from dlrm_sharded.ranks.process import LAUNCHER_VARIABLE

Commands = list[tuple[str, list[str]]]


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Commands:
    """Note the commands instead of running them."""
    started: Commands = []

    def note(command: str, overrides: Sequence[str], *, alone: bool = False) -> int:
        assert alone == (command == "train_policy"), "the other ranks have ended"
        started.append((command, [*overrides]))
        return 0

    monkeypatch.setattr(calibrate, "_run", note)
    monkeypatch.chdir(tmp_path_factory.mktemp("folder"))
    return started


def run(monkeypatch: pytest.MonkeyPatch, *overrides: str) -> int:
    monkeypatch.setattr("sys.argv", ["dlrm-calibrate", *overrides])
    return calibrate.main()


def test_offers_policies(
    commands: Commands, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "minutes=1", "collect.optimizer=adam", "policies=false") == 0
    assert [command for command, _ in commands] == ["collect_costs", "fit_cost_model"]
    assert "collect.optimizer=adam" in commands[0][1]
    assert not any(override.startswith("policies") for _, each in commands for override in each)
    assert (
        "dlrm-train-policy policy=dreamshard init_from=packaged costs=predicted "
        "schedule.num_rounds=3 optimizer=adam; with policies=true"
    ) in capsys.readouterr().out


def test_retunes_both_policies(commands: Commands, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(monkeypatch, "policies=true", "fit.num_steps=3") == 0
    assert [command for command, _ in commands[:2]] == ["collect_costs", "fit_cost_model"]
    overrides = ["init_from=packaged", "costs=predicted", "schedule.num_rounds=3"]
    assert commands[2:] == [
        ("train_policy", ["policy=autoshard", *overrides]),
        ("train_policy", ["policy=dreamshard", *overrides]),
    ]


@pytest.mark.parametrize(("rank", "num_commands"), [("0", 4), ("1", 1)])
def test_all_ranks_measure_and_the_first_does_the_rest(
    commands: Commands, monkeypatch: pytest.MonkeyPatch, rank: str, num_commands: int
) -> None:
    monkeypatch.setenv("RANK", rank)
    assert run(monkeypatch, "policies=true") == 0
    assert len(commands) == num_commands
    assert commands[0][0] == "collect_costs"


def test_no_policies_after_an_error(monkeypatch: pytest.MonkeyPatch, commands: Commands) -> None:
    def fail(command: str, overrides: Sequence[str]) -> int:
        commands.append((command, [*overrides]))
        return 2 if command == "fit_cost_model" else 0

    monkeypatch.setattr(calibrate, "_run", fail)
    assert run(monkeypatch, "policies=true") == 2
    assert [command for command, _ in commands] == ["collect_costs", "fit_cost_model"]


def test_its_commands_die_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would otherwise go on measuring; test_hydra_app has their side of it."""
    environments: list[dict[str, str]] = []

    def note(*_: object, env: dict[str, str], check: bool) -> SimpleNamespace:
        environments.append(env)
        return SimpleNamespace(returncode=int(check))

    monkeypatch.setattr(subprocess, "run", note)
    assert calibrate._run("collect_costs", []) == 0
    assert environments[0][LAUNCHER_VARIABLE] == str(os.getpid())


def test_a_wrong_value(
    commands: Commands, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run(monkeypatch, "policies=dreamshard")
    assert "policies is 'dreamshard', must be true or false" in capsys.readouterr().err
    assert commands == []
