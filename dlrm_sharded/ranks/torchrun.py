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
import logging
import os
import signal
import socket
import sys
import uuid
from collections.abc import Mapping, Sequence

from torch.distributed import DistNetworkError, run
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import (
    ChildFailedError,
    ProcessFailure,
    get_error_handler,
)
from torch.distributed.elastic.rendezvous.api import RendezvousError
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import DEFAULT_PORT
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint
from torch.distributed.launcher import api

from dlrm_sharded.files.errors import EXIT_ERROR, EXIT_USER_ERROR, ConfigError, LostRankError
from dlrm_sharded.ranks.host_agent import (
    LIMIT_AFTER_END_S,
    LIMIT_AFTER_SIGNAL_S,
    HostAgent,
    RepeatedMistakeError,
    adapt_rendezvous,
    cause,
    end_text,
    say,
)
from dlrm_sharded.ranks.job_store import PORT_TAKEN, TAKEN_TEXT, open_store
from dlrm_sharded.ranks.process import (
    ENDS_WITH_PARENT,
    LAUNCHER_VARIABLE,
    die_with_parent,
    quiet_without_reader,
    threads_of_a_rank,
)
from dlrm_sharded.ranks.store_questions import end_despite_questions

SHUTDOWN_S = 25
"""Time from SIGTERM to SIGKILL, in which ranks write a checkpoint. Slurm's own SIGKILL comes 30 s
after SIGTERM (KillWait). torch 2.11 always waits 30 s."""

PROBE_S = 60.0
"""Time in which the store of a job that has begun on another host must answer. torch looks up the
names of both ends, which takes up to 20 s each without a name server."""

EXIT_PREEMPTED = 128 + signal.SIGTERM
"""Exit code when ranks have ended after a signal and a checkpoint, though this launcher got none:
that of another host did. The run is not complete, and a scheduler starts it again."""

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
ASKING_TO_STOP = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
"""Signals that ranks take as a request to stop; the others reach them as SIGTERM."""


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
        return _launch(run.parse_args(list(arguments)))
    except ConfigError as error:
        say(f"error: {error}")
        return EXIT_USER_ERROR


def _launch(args: argparse.Namespace) -> int:
    num_hosts = run.parse_min_max_nnodes(args.nnodes)[1]
    if args.rdzv_id == "none" and num_hosts == 1:
        args.rdzv_id = str(uuid.uuid4())
    _prepare_environment(args, num_hosts)
    config, command, command_args = run.config_from_args(args)
    adapt_rendezvous(config)
    HostAgent.made.clear()
    api.LocalElasticAgent = HostAgent  # type: ignore[assignment,misc]
    config.signals_to_handle = ""  # no handlers of torch's, which a second signal would call again
    stop = StopRequest()
    stop.install()
    if os.environ.pop(ENDS_WITH_PARENT, ""):
        die_with_parent(number=signal.SIGTERM)
    try:
        if num_hosts > 1 and args.rdzv_backend in ("static", "c10d"):
            _check_endpoint(config.rdzv_endpoint)
        api.elastic_launch(config, command)(*command_args)
    except SignalException:
        return 128 + stop.number
    except RepeatedMistakeError as error:
        return _conclude(EXIT_USER_ERROR, str(error))
    except ChildFailedError as error:
        return _conclude(*_reason(error.failures))
    except DistNetworkError as error:
        if PORT_TAKEN not in str(error):
            raise
        raise ConfigError(f"{config.rdzv_endpoint} {TAKEN_TEXT}") from error
    except RendezvousError as error:
        if any(agent.were_preempted() for agent in HostAgent.made):
            return EXIT_PREEMPTED
        say(
            f"error: the hosts did not meet at {config.rdzv_endpoint}: {error}; the host that "
            "ended first has the reason, unless no host listens there"
        )
        return EXIT_ERROR
    finally:
        with contextlib.suppress(SignalException):  # which ends no more than this wait
            for agent in HostAgent.made:
                agent.wait_for_others(LIMIT_AFTER_SIGNAL_S if stop.number else LIMIT_AFTER_END_S)
    return EXIT_PREEMPTED if any(agent.were_preempted() for agent in HostAgent.made) else 0


def _prepare_environment(args: argparse.Namespace, num_hosts: int) -> None:
    """Set what ranks of this host have in common."""
    threads = threads_of_a_rank(run.determine_local_world_size(args.nproc_per_node))
    os.environ["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS") or str(threads)
    # a rank that crashes in a library says where, before it dies
    os.environ.setdefault("PYTHONFAULTHANDLER", "1")
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(SHUTDOWN_S))
    os.environ[LAUNCHER_VARIABLE] = str(os.getpid())
    if "LOGLEVEL" not in os.environ:  # whoever sets a level wants torch's lines
        logger = logging.getLogger("torch.distributed.elastic")
        logger.addHandler(logging.NullHandler())
        logger.propagate = False
    if num_hosts == 1:
        for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(variable, "lo")


def _check_endpoint(endpoint: str) -> None:
    """Raise ConfigError if another program has the port: torch would wait for its answer for ever.

    Nothing needs to listen there yet.
    """
    host, port = parse_rendezvous_endpoint(endpoint, default_port=DEFAULT_PORT)
    try:
        socket.create_connection((host, port), PROBE_S).close()
    except OSError:
        return
    try:
        open_store(host, port, is_master=False, timeout_s=PROBE_S)
    except LostRankError:
        raise ConfigError(f"{endpoint} {TAKEN_TEXT}") from None


class StopRequest:
    """The first signal that asks the job to end.

    Further ones are ignored: they would interrupt the agent while it waits for the ranks'
    checkpoints, and schedulers send SIGTERM twice.
    """

    number = 0

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


def _reason(failures: Mapping[int, ProcessFailure]) -> tuple[int, str]:
    """Return the exit code and the line for the failure that has caused the others."""
    rank, failure = cause(failures)
    code = EXIT_USER_ERROR if failure.exitcode == EXIT_USER_ERROR else EXIT_ERROR
    fields = failure.error_file_data.get("message")
    if isinstance(fields, dict):
        with contextlib.suppress(OSError):  # TorchX takes the reason from the launcher's file
            get_error_handler().dump_error_file(failure.error_file, failure.exitcode)
        shown = f"error: rank {rank} failed with {fields['message']} (its traceback is above)"
        return code, fields.get("extraInfo", {}).get("line", shown)
    shown = f"error: rank {rank} {end_text(failure.exitcode)}"
    return code, "" if code == EXIT_USER_ERROR else shown


def _conclude(code: int, line: str) -> int:
    """Print the line, unless the ranks of this host have shown it and nothing else; return code."""
    ends = [end for agent in HostAgent.made for end in agent.ends()]
    if line and [end["line"] for end in ends if end["is_said"]] != [line]:
        say(line)
    return code


if __name__ == "__main__":
    main()
