"""Starts ranks as torchrun does: `dlrm-torchrun --nproc-per-node N -m dlrm_sharded.train ...`.

It takes torchrun's arguments and runs torchrun's agent. It differs in what users see:

- The error message is the last line, and the exit code is the ranks': 0, 2 for an error that the
  user can fix, 1 for any other error, and 128 + n after signal n.
- The ranks of one host meet on the loopback interface, so nothing listens to the network.
- Restarted ranks (`--max-restarts`) meet in a store of their own. An error that the user can fix
  is not tried again, and every host's launcher says it.
- The launchers of several hosts end together: one that was asked to stop ends the others too.
- A first signal is passed on to the ranks, which then have `SHUTDOWN_S` to write a checkpoint;
  further signals do not interrupt them.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import logging
import os
import signal
import socket
import sys
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.distributed import DistNetworkError
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters
from torch.distributed.elastic.rendezvous.api import RendezvousError, rendezvous_handler_registry
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import DEFAULT_PORT
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.distributed.run import (
    config_from_args,
    determine_local_world_size,
    parse_args,
    parse_min_max_nnodes,
)

from dlrm_sharded.files.errors import (
    EXIT_ERROR,
    EXIT_USER_ERROR,
    ConfigError,
    HungRankError,
    LostRankError,
)
from dlrm_sharded.files.json_files import replace_file
from dlrm_sharded.ranks import flight_recorder
from dlrm_sharded.ranks.agent import (
    LIMIT_AFTER_END_S,
    LIMIT_AFTER_SIGNAL_S,
    RanksOfHost,
    UserErrorOfRanksError,
    use_host_agent,
)
from dlrm_sharded.ranks.interfaces import slow_name_lookup
from dlrm_sharded.ranks.job_store import PORT_TAKEN, TAKEN_TEXT, open_store
from dlrm_sharded.ranks.process import (
    LAUNCHER_VARIABLE,
    check_temporary_folder,
    check_threads,
    quiet_without_reader,
    threads_of_a_rank,
)
from dlrm_sharded.ranks.rank_ends import RememberedLogs
from dlrm_sharded.ranks.rendezvous import StartRendezvous, reached_address
from dlrm_sharded.ranks.store_questions import end_despite_questions

SHUTDOWN_S = 25
"""Time from SIGTERM to SIGKILL, in which ranks write a checkpoint. Slurm's own SIGKILL comes 30 s
after SIGTERM (KillWait). torch 2.11 always waits 30 s."""

LOOKUPS = 3
"""Most names that torch looks up for one connection to a store, whose times are waited for."""

PROBE_S = 10.0
"""Time in which the store of a job that has begun on another host must answer."""

EXIT_PREEMPTED = 128 + signal.SIGTERM
"""Exit code when ranks have ended after a signal and a checkpoint, though this launcher got none:
that of another host did. The run is not complete, and a scheduler starts it again."""

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
ASKING_TO_STOP = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
"""Signals that ranks take as a request to stop; the others reach them as SIGTERM."""

ELASTIC_LOGGER = "torch.distributed.elastic"


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run, and exit with the code that the ranks' end calls for."""
    with quiet_without_reader():
        code = launch(sys.argv[1:] if arguments is None else arguments)
        end_despite_questions(code)
        sys.exit(code)


def launch(arguments: Sequence[str]) -> int:
    """Start ranks and wait for their end; return the exit code.

    Args:
        arguments: as torchrun takes them.
    """
    try:
        return _launch(parse_args(list(arguments)))
    except ConfigError as error:
        say(f"error: {error}")
        return EXIT_USER_ERROR


def _launch(args: argparse.Namespace) -> int:
    num_hosts = parse_min_max_nnodes(args.nnodes)[1]
    if args.rdzv_id == "none" and num_hosts == 1:
        args.rdzv_id = str(uuid.uuid4())
    check_threads()
    check_temporary_folder()
    threads = threads_of_a_rank(determine_local_world_size(args.nproc_per_node))
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    # a rank that crashes in a library says where, before it dies
    os.environ.setdefault("PYTHONFAULTHANDLER", "1")
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(SHUTDOWN_S))
    os.environ[LAUNCHER_VARIABLE] = str(os.getpid())
    if num_hosts == 1:
        for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(variable, "lo")
    config, command, command_args = config_from_args(args)
    flight_recorder.name_dumps(f"{config.run_id} {config.rdzv_endpoint}")
    failures = FailureLog()
    failures.install()
    assert config.logs_specs is not None
    logs = RememberedLogs(config.logs_specs)
    config.logs_specs = logs
    _replace_rendezvous(config)
    agents = use_host_agent(
        RanksOfHost(
            mistake=lambda: logs.mistake(failures.exit_code),
            were_preempted=logs.were_preempted,
            say_restart=failures.say_restart,
        )
    )
    config.signals_to_handle = ""  # no handlers of torch's, which a second signal would call again
    stop = StopRequest()
    stop.install()
    try:
        if num_hosts > 1 and args.rdzv_backend in ("static", "c10d"):
            _check_endpoint(config.rdzv_endpoint)
        elastic_launch(config, command)(*command_args)
    except SignalException:
        return 128 + stop.number
    except UserErrorOfRanksError as error:
        if str(error) and not logs.has_said(str(error)):
            say(str(error))
        return EXIT_USER_ERROR
    except ChildFailedError as error:
        return _conclude(error.failures, unsaid=None if logs.has_said() else logs.line())
    except DistNetworkError as error:
        if PORT_TAKEN not in str(error):
            raise
        raise ConfigError(f"{config.rdzv_endpoint} {TAKEN_TEXT}") from error
    except RendezvousError as error:
        if logs.were_preempted():
            return EXIT_PREEMPTED
        say(
            f"error: the hosts did not meet at {config.rdzv_endpoint}: {error}; the host that "
            "ended first has the reason, unless no host listens there"
        )
        return EXIT_ERROR
    finally:
        with contextlib.suppress(SignalException):  # which ends no more than this wait
            for agent in agents:
                agent.end_with_others(LIMIT_AFTER_SIGNAL_S if stop.number else LIMIT_AFTER_END_S)
    return EXIT_PREEMPTED if logs.were_preempted() else 0


def _check_endpoint(endpoint: str) -> None:
    """Raise ConfigError if another program has the port: torch would wait for its answer for ever.

    Nothing needs to listen there yet.
    """
    host, port = parse_rendezvous_endpoint(endpoint, default_port=DEFAULT_PORT)
    try:
        socket.create_connection((host, port), PROBE_S).close()
    except OSError:
        return
    lookup_s, slow = slow_name_lookup(host, port)
    if slow:
        say(f"the start takes longer{slow}")
    try:
        open_store(host, port, is_master=False, timeout_s=PROBE_S + LOOKUPS * lookup_s)
    except LostRankError:
        raise ConfigError(f"{endpoint} {TAKEN_TEXT}{slow}") from None


class StopRequest:
    """The first signal that asks the job to end.

    Further ones are ignored: they would interrupt the agent while it waits for the ranks'
    checkpoints, and schedulers send SIGTERM twice.
    """

    def __init__(self) -> None:
        self.number = 0

    def install(self) -> None:
        for number in SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup ignores SIGHUP
                signal.signal(number, self._handle)

    def _handle(self, number: int, frame: object) -> None:
        if self.number == 0:
            self.number = number
            if number != signal.SIGINT:  # after which the ranks say so themselves
                say(
                    f"{signal.Signals(number).name}: the ranks are ended; those that train write a "
                    "checkpoint first"
                )
            passed_on = number if number in ASKING_TO_STOP else signal.SIGTERM
            raise SignalException(f"stopped by signal {number}", signal.Signals(passed_on))


class FailureLog(logging.Handler):
    """Takes the agent's log in place of the terminal, and knows how a rank failed last.

    torchrun tells the end of a rank before a restart only to its log.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.exit_code: int | None = None
        self.local_rank = -1

    def install(self) -> None:
        logger = logging.getLogger(ELASTIC_LOGGER)
        logger.addHandler(self)
        logger.propagate = "LOGLEVEL" in os.environ  # whoever sets a level wants torch's lines

    def say_restart(self, number: int) -> None:
        """Say that the ranks start again, and why; a later failure is another one."""
        reason = "ranks of another host have ended"
        if self.exit_code is not None:
            reason = f"local rank {self.local_rank} {_how(self.exit_code)}"
        say(f"{reason}; all ranks start again (restart {number})")
        self.exit_code = None

    def emit(self, record: logging.LogRecord) -> None:
        arguments = record.args if isinstance(record.args, tuple) else ()
        if str(record.msg).startswith("failed (exitcode") and len(arguments) >= 2:
            self.exit_code, self.local_rank = int(str(arguments[0])), int(str(arguments[1]))
        elif str(record.msg).startswith("Unable to shutdown") and arguments:
            say(f"rank process {arguments[0]} did not end after SIGTERM and is killed")


def _replace_rendezvous(config: LaunchConfig) -> None:
    """Let the ranks meet by `StartRendezvous`; a static rendezvous stays torchrun's."""
    several_hosts = config.max_nodes > 1
    if several_hosts and config.rdzv_backend == "static":
        return
    backend = config.rdzv_backend

    def create(parameters: RendezvousParameters) -> RendezvousHandler:
        hosts = address = None
        if several_hosts:
            os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # ours takes its place
            theirs = copy.copy(parameters)
            theirs.backend = backend
            address = reached_address(theirs) if backend == "c10d" else theirs.local_addr
            hosts = rendezvous_handler_registry.create_handler(theirs)
        return StartRendezvous(parameters, hosts, address)

    config.rdzv_backend = f"dlrm_sharded_{uuid.uuid4().hex}"  # a name cannot be registered twice
    rendezvous_handler_registry.register(config.rdzv_backend, create)


def _conclude(failures: Mapping[int, ProcessFailure], unsaid: str | None) -> int:
    """Print the reason unless a rank did so last; return the exit code.

    Args:
        unsaid: the line of an error that no rank of this host has shown; None if one has.
    """
    rank, failure = min(failures.items(), key=lambda item: (_gravity(item[1]), item[1].timestamp))
    _pass_on(failure)
    is_bug = _error_class(failure) is None  # a message without its class came with a traceback
    said_by_a_rank = _gravity(failure) in (0, 1, 4) or not is_bug
    lost_peers = any(_error_class(other) == LostRankError.__name__ for other in failures.values())
    if not said_by_a_rank or (lost_peers and _gravity(failure) < 4):
        reason = _message(failure)
        if reason is None:
            reason = f"rank {rank} {_how(failure.exitcode)}"
        elif is_bug and failure.exitcode != EXIT_USER_ERROR and _gravity(failure) == 2:
            reason = f"rank {rank} failed with {reason} (its traceback is above)"
        elif rank:
            reason = f"rank {rank}: {reason}"
        say(f"error: {reason}")
    elif unsaid is not None:
        say(unsaid)
    return EXIT_USER_ERROR if failure.exitcode == EXIT_USER_ERROR else EXIT_ERROR


def _gravity(failure: ProcessFailure) -> int:
    """Return a number that is lower the more likely this failure caused the others."""
    if _error_class(failure) == HungRankError.__name__:
        return 0
    if failure.exitcode == EXIT_USER_ERROR:
        return 1
    if _error_class(failure) == LostRankError.__name__:
        return 4
    if _message(failure) is not None:
        return 2
    # The agent itself ends the other ranks with SIGTERM.
    return 5 if failure.exitcode == -signal.SIGTERM else 3


def _fields(failure: ProcessFailure) -> dict[str, Any]:
    fields = failure.error_file_data.get("message")
    return fields if isinstance(fields, dict) else {}


def _message(failure: ProcessFailure) -> str | None:
    """Return what the rank wrote to its error file."""
    message = _fields(failure).get("message")
    return None if message is None else str(message)


def _error_class(failure: ProcessFailure) -> str | None:
    extra: dict[str, Any] = _fields(failure).get("extraInfo") or {}
    return extra.get("error_class")


def _how(exit_code: int) -> str:
    if exit_code >= 0:
        return f"ended with exit code {exit_code}"
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:
        name = f"signal {-exit_code}"
    hints = {
        "SIGKILL": "; Linux does so when memory runs out",
        "SIGABRT": "; NCCL does so when a collective takes longer than timeout_s: then "
        + flight_recorder.reading_text(),
    }
    return f"was killed by {name}{hints.get(name, '')}"


def _pass_on(failure: ProcessFailure) -> None:
    """Copy the error file of a rank to where TorchX wants that of its app."""
    target = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if target and _fields(failure):
        data = json.dumps(failure.error_file_data).encode()
        with contextlib.suppress(OSError):
            Path(target).parent.mkdir(parents=True, exist_ok=True)
            replace_file(target, data)


if __name__ == "__main__":
    main()
