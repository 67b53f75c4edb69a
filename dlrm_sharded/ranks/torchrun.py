"""Starts ranks like torchrun: `dlrm-torchrun --nproc-per-node N -m dlrm_sharded.train ...`.

It takes torchrun's arguments and runs torchrun's agent. It differs in these points:

- The error message is the last line, and the exit code is that of the ranks: 0, 2 for an error that
  the user can fix, 1 for any other error, and 128 + n after signal n.
- The ranks of one host meet on the loopback interface, so nothing listens on the network.
- Restarted ranks (`--max-restarts`) meet in a new store. After an error that the user can fix,
  ranks are not restarted, and every host's launcher prints the error.
- The launchers of several hosts end together: one that was asked to stop ends the others too.
- A first signal is passed on to the ranks, which then have `SHUTDOWN_S` to write a checkpoint;
  further signals do not interrupt them.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import uuid
from collections.abc import Sequence

# torch reads it when it is loaded: its warnings about a lost store are hundreds of lines
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

import torch
from torch.distributed import DistNetworkError, run
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.rendezvous.api import RendezvousError
from torch.distributed.launcher import api

from dlrm_sharded.files.errors import EXIT_ERROR, EXIT_USER_ERROR, ConfigError
from dlrm_sharded.ranks.gpus import cores_near_gpus, visible_gpus
from dlrm_sharded.ranks.host_agent import HostAgent, RanksEndedError, say
from dlrm_sharded.ranks.process import (
    ENDS_WITH_PARENT,
    LAUNCHER_VARIABLE,
    die_with_parent,
    quiet_without_reader,
    threads_of_a_rank,
)
from dlrm_sharded.ranks.rendezvous import adapt_rendezvous
from dlrm_sharded.ranks.store_questions import end_despite_questions

SHUTDOWN_S = 25
"""Time from SIGTERM to SIGKILL, in which ranks write a checkpoint. Slurm's own SIGKILL comes 30 s
after SIGTERM (KillWait). torch 2.11 always waits 30 s."""

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Settings of torch's allocator; torch 2.13 reads both."""

ALLOCATOR = "expandable_segments:True"
"""Makes blocks growable: otherwise, batches of changing sizes left a third of the memory in blocks
that did not fit."""

NUMA_VARIABLE = "DLRM_SHARDED_NUMA_BINDING"
"""With the value none, ranks are not bound; torchrun's `--numa-binding` gives other bindings."""

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
"""Signals that ask the job to stop; they are passed on to the ranks."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run, and exit with the code of `launch`."""
    with quiet_without_reader():
        code = launch(sys.argv[1:] if arguments is None else arguments)
        end_despite_questions(code)
        sys.exit(code)


def launch(arguments: Sequence[str]) -> int:
    """Start ranks, wait until they end, and return the exit code.

    Args:
        arguments: torchrun's arguments.
    """
    args = run.parse_args(list(arguments))
    num_hosts = run.parse_min_max_nnodes(args.nnodes)[1]
    if args.rdzv_id == "none" and num_hosts == 1:
        args.rdzv_id = str(uuid.uuid4())
    _prepare_environment(args, num_hosts)
    config, command, command_args = run.config_from_args(args)
    api.LocalElasticAgent = HostAgent  # type: ignore[assignment,misc]
    config.signals_to_handle = ""  # not torch's handlers, which a second signal would call again
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(number, _stop)
    if os.environ.pop(ENDS_WITH_PARENT, ""):
        die_with_parent(number=signal.SIGTERM)
    try:
        adapt_rendezvous(config)
        api.elastic_launch(config, command)(*command_args)
    except SignalException as error:
        return 128 + error.sigval
    except RanksEndedError as end:
        if end.line:
            say(end.line)
        return end.code
    except (DistNetworkError, RendezvousError) as error:
        # some of torch's errors have no text
        reason = (str(error.__cause__ or error) or type(error).__name__).splitlines()[0]
        say(
            f"error: the hosts did not meet at {config.rdzv_endpoint}: {reason}; the host that "
            "ended first has the reason, unless no host listens there or another program does"
        )
        is_taken = "EADDRINUSE" in reason or "Ping failed" in reason
        return EXIT_USER_ERROR if is_taken else EXIT_ERROR
    except ConfigError as error:
        say(f"error: {error}")
        return EXIT_USER_ERROR
    return 0


def _prepare_environment(args: argparse.Namespace, num_hosts: int) -> None:
    """Set the environment that ranks of this host have in common."""
    threads = threads_of_a_rank(run.determine_local_world_size(args.nproc_per_node))
    if torch.cuda.is_available() and (gpus := visible_gpus()):
        threads = _prepare_for_gpus(args, gpus, threads)
    os.environ["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS") or str(threads)
    # a rank that crashes in a library prints a traceback before it dies
    os.environ.setdefault("PYTHONFAULTHANDLER", "1")
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(SHUTDOWN_S))
    os.environ[LAUNCHER_VARIABLE] = str(os.getpid())
    if "LOGLEVEL" not in os.environ:  # users who set a level want torch's lines
        logger = logging.getLogger("torch.distributed.elastic")
        logger.addHandler(logging.NullHandler())
        logger.propagate = False
    if num_hosts == 1:
        for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(variable, "lo")


def _prepare_for_gpus(args: argparse.Namespace, gpus: Sequence[str], threads: int) -> int:
    """Choose torch's allocator and the cores of ranks on GPUs, and print the choice.

    Returns:
        The number of threads of a rank; at most its number of cores if it is bound.
    """
    chosen = []
    if not os.environ.keys() & set(ALLOCATOR_VARIABLES):
        os.environ[ALLOCATOR_VARIABLES[0]] = ALLOCATOR
        chosen.append(f"torch allocates with {ALLOCATOR} ({ALLOCATOR_VARIABLES[0]} overrides it)")
    # NCCL cannot register buffers in such segments for a CUDA graph
    os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")
    is_chosen = getattr(args, "numa_binding", "") is not None  # "" if torch has no such option
    may_bind = not is_chosen and os.environ.get(NUMA_VARIABLE) != "none"
    if may_bind and (cores := cores_near_gpus(gpus)):
        args.numa_binding, threads = "node", min(cores, threads)
        chosen.append(
            f"each rank has the cores of its GPU's NUMA node ({NUMA_VARIABLE}=none binds none)"
        )
    if chosen:
        say("; ".join(chosen))
    return threads


def _stop(number: int, frame: object) -> None:
    """Make the agent end the ranks.

    Further signals are ignored: they would interrupt the agent while it waits for the ranks'
    checkpoints, and schedulers send SIGTERM twice.
    """
    for other in SIGNALS:
        signal.signal(other, signal.SIG_IGN)
    if number != signal.SIGINT:  # of which the ranks tell users themselves
        say(
            f"{signal.Signals(number).name}: the ranks are ended; those that train write a "
            "checkpoint first"
        )
    raise SignalException(f"stopped by signal {number}", signal.Signals(number))


if __name__ == "__main__":
    main()
