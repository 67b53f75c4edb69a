"""The steps of a calibration, and what is done about policies after it."""

import os
import subprocess
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from dlrm_sharded.commands import calibrate
from dlrm_sharded.files.json_files import write_json
from dlrm_sharded.plans.task import with_optimizer
from dlrm_sharded.ranks.process import LAUNCHER_VARIABLE
from tests.unit.made_up import tables_of, task_of

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


def test_offers_policies(commands, run_command):
    words = ("minutes=1", "collect.optimizer=adam", "policies=false")
    done = run_command(calibrate.main, *words)
    assert done.returncode == 0
    assert [command for command, _ in commands] == ["collect_costs", "fit_cost_model"]
    assert "collect.optimizer=adam" in commands[0][1]
    assert not any(override.startswith("policies") for _, each in commands for override in each)
    assert (
        "dlrm-train-policy policy=dreamshard init_from=packaged costs=predicted "
        "schedule.num_rounds=3 optimizer=adam; with policies=true"
    ) in done.stdout


def test_retunes_both_policies(commands, run_command):
    assert run_command(calibrate.main, "policies=true", "fit.num_steps=3").returncode == 0
    assert [command for command, _ in commands[:2]] == ["collect_costs", "fit_cost_model"]
    overrides = ["init_from=packaged", "costs=predicted", "schedule.num_rounds=3"]
    assert commands[2:] == [
        ("train_policy", ["policy=autoshard", *overrides]),
        ("train_policy", ["policy=dreamshard", *overrides]),
    ]


@pytest.mark.parametrize(("rank", "num_commands"), [("0", 4), ("1", 1)])
def test_all_ranks_measure_and_one_does_the_rest(
    commands, run_command, monkeypatch, rank, num_commands
):
    monkeypatch.setenv("RANK", rank)
    assert run_command(calibrate.main, "policies=true").returncode == 0
    assert len(commands) == num_commands
    assert commands[0][0] == "collect_costs"


def test_a_task_decides_what_is_measured_and_with_which_optimizer(commands, run_command, tmp_path):
    path = tmp_path / "my task=1.json"
    write_json(path, with_optimizer(task_of(tables_of((10, 4, 1.0))), "sgd").to_json())
    done = run_command(calibrate.main, f"task={path}", "collect.seed=3")
    assert done.returncode == 0
    command, overrides = commands[0]
    assert command == "collect_costs"
    parsed = OverridesParser.create().parse_overrides(overrides)
    values = {override.key_or_group: override.value() for override in parsed}
    assert values["collect.task"] == str(path)
    assert values["collect.optimizer"] == "sgd"
    assert values["collect.seed"] == 3
    assert "optimizer=sgd" in done.stdout, "policies are re-tuned for the same optimizer"


def test_a_task_that_is_none(commands, run_command):
    done = run_command(calibrate.main, "task=nowhere.json")
    assert done.returncode == 2
    assert "nowhere.json" in done.stderr
    assert commands == []


def test_no_policies_after_an_error(monkeypatch, commands, run_command):
    def fail(command: str, overrides: Sequence[str]) -> int:
        commands.append((command, [*overrides]))
        return 2 if command == "fit_cost_model" else 0

    monkeypatch.setattr(calibrate, "_run", fail)
    assert run_command(calibrate.main, "policies=true").returncode == 2
    assert [command for command, _ in commands] == ["collect_costs", "fit_cost_model"]


def test_its_commands_die_with_it(monkeypatch):
    """They would otherwise go on measuring; test_hydra_app has their side of it."""
    environments: list[dict[str, str]] = []

    def note(*_: object, env: dict[str, str], check: bool) -> SimpleNamespace:
        environments.append(env)
        return SimpleNamespace(returncode=int(check))

    monkeypatch.setattr(subprocess, "run", note)
    assert calibrate._run("collect_costs", []) == 0
    assert environments[0][LAUNCHER_VARIABLE] == str(os.getpid())


def test_a_wrong_value(commands, run_command):
    done = run_command(calibrate.main, "policies=dreamshard")
    assert "policies is 'dreamshard', must be true or false" in done.stderr
    assert commands == []
