"""Commands end with one message and exit code 2 after an error that the user can fix."""

import errno
import logging
import os
import re
import signal
import sys
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, InstantiationException
from hydra.utils import instantiate
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dlrm_sharded.commands import exit_codes as exit_codes_module
from dlrm_sharded.commands.exit_codes import exit_codes
from dlrm_sharded.commands.messages import readable_message
from dlrm_sharded.files.errors import (
    EXIT_ERROR,
    EXIT_INTERRUPTED,
    EXIT_USER_ERROR,
    ConfigError,
    DataError,
    DivergenceError,
    InfeasibleTaskError,
    InvalidPlanError,
    LostFolderError,
    UnsavedError,
)
from dlrm_sharded.ranks.agreement import _sendable, as_reported_by_rank_zero
from dlrm_sharded.ranks.process import kept_signals
from tests.processes import wait_until
from tests.unit.commands.conftest import composed_config

NO_PLAN = "table 't' needs 8 B, the freest rank has 4 B"


def instantiated(cause: Exception) -> Exception:
    """What Hydra makes of an error in a constructor."""
    error = InstantiationException("Error in call to target")
    error.__cause__ = cause
    return error


@pytest.fixture(autouse=True)
def rank_0_before_hydra(no_torchrun: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HydraConfig.instance(), "cfg", None)


def said(error: Exception) -> str:
    """The message of an error that the user can fix."""
    message = readable_message(error)
    assert message is not None
    return message


@pytest.mark.parametrize(
    "kind",
    [ConfigError, DataError, DivergenceError, InfeasibleTaskError, InvalidPlanError],
    ids=lambda kind: kind.__name__,
)
def test_our_errors_are_their_message(kind):
    assert readable_message(kind(NO_PLAN)) == NO_PLAN
    assert readable_message(instantiated(kind(NO_PLAN))) == NO_PLAN


SHARDERS = "dlrm_sharded.sharders.heuristics"
MISTAKES: dict[str, tuple[Callable[[], object], str]] = {
    "argument": (
        lambda: instantiate({"_target_": f"{SHARDERS}.RandomSharder", "sede": 1}),
        r"RandomSharder(?s:.*) unexpected keyword argument 'sede'",
    ),
    "class": (lambda: instantiate({"_target_": f"{SHARDERS}.Nobody"}), "Nobody"),
    "option": (
        lambda: composed_config("train", "sharder=nobody"),
        r"\Athere is no sharder 'nobody'; known: autoshard, dim, .*; your own need --config-dir\Z",
    ),
    "key": (lambda: composed_config("train", "trainer.num_stepz=3"), "num_stepz"),
    "missing": (lambda: OmegaConf.create({"task": "???"}).task, "task"),
}


@pytest.mark.parametrize(("make", "message"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes_in_a_config_are_named(make, message):
    with pytest.raises((HydraException, OmegaConfBaseException)) as raised:
        make()
    assert re.search(message, said(raised.value))


@pytest.mark.parametrize(
    "error",
    [
        *(RuntimeError("bug"), KeyError("bug"), AssertionError("bug")),
        instantiated(RuntimeError("bug")),
        ConnectionResetError(errno.ECONNRESET, "reset"),
    ],
    ids=repr,
)
def test_bugs_have_no_message(error):
    assert readable_message(error) is None


def test_users_errors_exit_with_2_and_one_line(capsys):
    with pytest.raises(SystemExit) as ended, exit_codes():
        raise InfeasibleTaskError(NO_PLAN)
    assert ended.value.code == EXIT_USER_ERROR == 2
    printed = capsys.readouterr()
    assert printed.err == f"error: {NO_PLAN}\n"
    assert printed.out == ""


@pytest.mark.parametrize("kind", [LostFolderError, UnsavedError], ids=lambda kind: kind.__name__)
def test_what_happens_to_a_run_is_no_error_of_its_user(kind):
    """A launcher may start it again, which it does not after a 2."""
    with pytest.raises(SystemExit) as ended, exit_codes():
        raise kind("another job has taken the folder over")
    assert ended.value.code == EXIT_ERROR == 1


@pytest.mark.parametrize("error", [RuntimeError("bug"), SystemExit(3)])
def test_other_errors_pass(error, capsys):
    with pytest.raises(type(error)) as raised, exit_codes():
        raise error
    assert raised.value is error
    assert capsys.readouterr().err == ""


def test_interrupted(capsys):
    with pytest.raises(SystemExit) as ended, exit_codes():
        raise KeyboardInterrupt
    assert ended.value.code == EXIT_INTERRUPTED == 130
    assert capsys.readouterr().err == "stopped by the user\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP], ids=str)
def test_stopped_by_a_signal(number, capsys):
    """Outside of a training; a second signal does not interrupt the end."""
    unwound = []

    def stop() -> None:
        try:
            os.kill(os.getpid(), number)
        finally:
            os.kill(os.getpid(), number)
            unwound.append(number)

    with pytest.raises(SystemExit) as ended, exit_codes(), exit_codes():
        stop()
    assert ended.value.code == 128 + number
    assert capsys.readouterr().err == f"stopped by {number.name}\n"
    assert unwound == [number]
    assert signal.signal(number, signal.SIG_DFL) is signal.SIG_IGN
    with exit_codes():
        pass
    assert signal.getsignal(number) is signal.SIG_DFL


class Finalized:
    """Gets a signal while it is finalized."""

    def __init__(self, number: signal.Signals) -> None:
        self.number = number

    def __del__(self) -> None:
        os.kill(os.getpid(), self.number)
        sum(range(10))  # here Python calls the handler, at the latest


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=str)
def test_a_signal_in_a_finalizer_ends_the_command(number, capsys):
    """Python ignores what is raised there, and the command would go on to its end."""

    def train() -> None:
        for _ in range(3):
            Finalized(number)
        wait_until(lambda: False, "the signal comes again", 60)

    with kept_signals([number]):
        if number == signal.SIGINT:
            signal.signal(number, signal.default_int_handler)
        with pytest.raises(SystemExit) as ended, exit_codes(all_ranks_alike=True), exit_codes():
            train()
    assert ended.value.code == 128 + number
    assert capsys.readouterr().err.startswith("stopped by ")
    assert sys.unraisablehook.__module__ != exit_codes_module.__name__


def test_other_errors_of_finalizers_are_shown(monkeypatch):
    shown = []
    monkeypatch.setattr(sys, "unraisablehook", lambda ignored: shown.append(ignored.exc_type))
    with exit_codes():
        Finalized(None)  # type: ignore[arg-type]
    assert shown == [TypeError]


def test_ranks_are_ended_by_their_launcher(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    with exit_codes():
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.parametrize(
    ("everywhere", "printed"),
    [(False, f"error on rank 1: {NO_PLAN}\n"), (True, "")],
    ids=["its_own", "of_all_ranks"],
)
def test_other_ranks_report_only_their_own(everywhere, printed, monkeypatch, capsys):
    for key, value in {"RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(key, value)
    waits = []
    monkeypatch.setattr(exit_codes_module, "_end_together", lambda *_, **options: waits.append(1))
    error = ConfigError(NO_PLAN)
    with pytest.raises(SystemExit) as ended, exit_codes():
        raise as_reported_by_rank_zero(error) if everywhere else error
    assert ended.value.code == EXIT_USER_ERROR
    assert len(waits) == everywhere, "torchrun would end rank 0, which reports it"
    assert capsys.readouterr().err == printed


def test_rank_0_reports_an_unknown_option(monkeypatch, capsys):
    for key, value in {"RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(key, value)
    monkeypatch.setattr(exit_codes_module, "_end_together", lambda *_, **options: None)
    with pytest.raises(SystemExit), exit_codes(all_ranks_alike=True):
        composed_config("train", "sharder=nobody")
    assert capsys.readouterr().err == ""


@pytest.fixture
def within_hydra() -> None:
    HydraConfig.instance().set_config(composed_config("train", return_hydra_config=True))


@pytest.mark.usefixtures("within_hydra")
def test_a_started_run_logs_its_error(caplog, capsys):
    """So that it is in the run's log file too, and on the terminal once."""
    with caplog.at_level(logging.ERROR), pytest.raises(SystemExit), exit_codes():
        raise ConfigError(NO_PLAN)
    assert [record.getMessage() for record in caplog.records] == [f"error: {NO_PLAN}"]
    assert capsys.readouterr().err == ""


class OutOfMemoryError(RuntimeError):
    """What torch raises on GPUs; only its name is known where torch is not loaded."""


def fail_on_a_gpu() -> None:
    raise OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")


@pytest.mark.parametrize(
    ("allocate", "figure"),
    [
        (lambda: torch.empty(2**50), r"4,194,304.00 GiB cannot be allocated"),
        (lambda: torch.empty(2**62, 2**62), r"Storage size|numel"),
        (lambda: np.empty(2**58, np.uint8), r"Unable to allocate 256. PiB"),
        (fail_on_a_gpu, r"Tried to allocate 20.00 GiB"),
    ],
)
@pytest.mark.parametrize(
    "through", [lambda e: e, _sendable, instantiated], ids=["here", "other_rank", "yaml"]
)
def test_allocations_that_fail(allocate, figure, through):
    """Here, on another rank, and in a constructor that a yaml names."""
    with pytest.raises((RuntimeError, MemoryError)) as raised:
        allocate()
    message = said(through(raised.value))
    assert re.search(rf"^there is not enough memory: .*({figure}).* Lower batch_size", message)


def test_long_messages_are_shortened():
    message = said(ConfigError("many words " * 10_000 + "the end"))
    assert message.endswith("the end")
    assert len(message) < 4100


def test_a_value_error_of_the_command_is_a_traceback(monkeypatch):
    """Before the command is called it is Hydra's, and a message."""
    monkeypatch.setattr(exit_codes_module, "_runs_command", False)
    with pytest.raises(exit_codes_module.ReportedExit), exit_codes(all_ranks_alike=True):
        raise ValueError("an override")
    with pytest.raises(ValueError, match="ours"), exit_codes(all_ranks_alike=True), exit_codes():
        raise ValueError("ours")
