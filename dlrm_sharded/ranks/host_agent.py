"""The agent of a launcher, which starts and watches the ranks of one host.

torchrun's own agent restarts ranks even after an error that would occur again, and does not learn
of such an error on another host. After success, it waits 300 s for agents that may have died, and
handles no signals in that time. After a failure, it ends at once, and other agents lose the store
that it serves.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server import RunResult, WorkerGroup
from torch.distributed.elastic.agent.server.api import DEFAULT_ROLE
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure, get_error_handler
from torch.distributed.elastic.rendezvous.api import RendezvousError
from torch.distributed.elastic.utils.store import barrier

from dlrm_sharded.files.errors import EXIT_ERROR, EXIT_USER_ERROR, PreemptedError
from dlrm_sharded.ranks.attempt import RESTARTS_VARIABLE
from dlrm_sharded.ranks.store_questions import QUESTION_S, StoreQuestions

LIMIT_AFTER_SUCCESS_S = 300.0
LIMIT_AFTER_END_S = 10.0
LIMIT_AFTER_SIGNAL_S = 4.0
"""Time that an agent waits for the others: after its ranks' success; after any other end, when
another agent may be gone; and after a signal, when its ranks may have taken 25 of 30 s already."""

LAUNCHER_EXIT_PREEMPTED = 128 + signal.SIGTERM
"""Exit code if ranks ended with a checkpoint because the launcher of another host got a signal. The
run is not complete, so a scheduler should start it again."""

MISTAKE = "dlrm_sharded_mistake"
"""Key in the agents' store; its value is the message line of an error that the user can fix."""


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class RanksEndedError(Exception):
    """Ranks ended with an error or after a signal.

    Args:
        code: exit code of the launcher.
        line: the reason; empty if the ranks have printed it.
    """

    def __init__(self, code: int, line: str) -> None:
        super().__init__(line)
        self.code = code
        self.line = line


class HostAgent(LocalElasticAgent):
    """torch's agent, which ends together with the agents of the other hosts."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._end: tuple[int, str] | None = None
        # An agent must handle signals and its ranks' end even if the store does not answer.
        self._ask = StoreQuestions(QUESTION_S, RuntimeError, RendezvousError).ask
        handler = self._worker_group.spec.rdzv_handler
        for name in ("num_nodes_waiting", "shutdown"):
            setattr(handler, name, functools.partial(self._ask, getattr(handler, name), 0))

    def run(self, role: str = DEFAULT_ROLE) -> RunResult:
        """Run the ranks, and then wait for a limited time until the agents of all hosts have ended.

        Raises:
            RanksEndedError: ranks ended with an error, or because of a signal on another host.
        """
        limit_s = LIMIT_AFTER_END_S
        try:
            result = super().run(role)
            messages = self._messages()
            if self._end is not None:
                code, line = self._end
                is_said = [one["line"] for one in messages if one["is_said"]] == [line]
                raise RanksEndedError(code, "" if is_said else line)
            if any(one["error_class"] == PreemptedError.__name__ for one in messages):
                raise RanksEndedError(LAUNCHER_EXIT_PREEMPTED, "")
            limit_s = LIMIT_AFTER_SUCCESS_S
            return result
        except SignalException:
            limit_s = LIMIT_AFTER_SIGNAL_S
            raise
        finally:
            num_hosts = self._worker_group.group_world_size
            if self._store is not None and num_hosts > 1:
                wait = functools.partial(barrier, self._store, num_hosts, "all_end", limit_s)
                StoreQuestions(limit_s, RuntimeError).ask(wait, None)

    def _exit_barrier(self) -> None:
        """Do nothing, because `run` waits for the other agents."""

    def _messages(self) -> list[Mapping[str, Any]]:
        """Return the messages that this host's ranks wrote when they ended, after the last start.

        See `commands.exit_codes`: `line` is the line that users see of the error, and `is_said`
        tells whether the rank has printed it.
        """
        found = []
        for path in (self._pcontext.error_files if self._pcontext else {}).values():
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                found.append(json.loads(Path(path).read_text())["message"]["extraInfo"])
        return [one for one in found if "line" in one]

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result = super()._monitor_workers(worker_group)
        self._end = self._end_after(result.failures) if result.is_failed() else None
        if self._end is not None and self._end[0] == EXIT_USER_ERROR:
            self._remaining_restarts = 0  # the ranks would end with the same error again
        return result

    def _end_after(self, failures: Mapping[int, ProcessFailure]) -> tuple[int, str]:
        """Return the exit code and the message line for failures of ranks.

        An error that the user can fix counts for all hosts, whichever host found it.
        """
        code, line = reason(failures)
        store = self._store
        assert store is not None, "the agents have met"
        if code == EXIT_USER_ERROR:
            self._ask(lambda: store.set(MISTAKE, line), None)
        elif self._ask(lambda: store.check([MISTAKE]), False):
            return EXIT_USER_ERROR, self._ask(lambda: store.get(MISTAKE).decode(), line)
        return code, line

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        number = int(os.environ.get(RESTARTS_VARIABLE, "0")) + 1
        os.environ[RESTARTS_VARIABLE] = str(number)
        why = self._end[1] if self._end else "ranks of another host have ended"
        say(f"{why}; all ranks start again (restart {number})")
        # A store that torch made for the ranks serves only one start.
        worker_group.spec.rdzv_handler._bootstrap_store_info = None  # type: ignore[attr-defined]
        super()._restart_workers(worker_group)


def reason(failures: Mapping[int, ProcessFailure]) -> tuple[int, str]:
    """Return the exit code and the message line for the failure that caused the others.

    That is the first one, because the agent itself ends the other ranks with SIGTERM. A program
    that exits with 2 and writes no error file could not parse its command line, and printed why.
    """
    rank, failure = min(
        failures.items(), key=lambda one: (one[1].exitcode == -signal.SIGTERM, one[1].timestamp)
    )
    code = EXIT_USER_ERROR if failure.exitcode == EXIT_USER_ERROR else EXIT_ERROR
    message = failure.error_file_data.get("message")
    if isinstance(message, dict):
        with contextlib.suppress(OSError):  # TorchX takes the reason from the launcher's file
            get_error_handler().dump_error_file(failure.error_file, failure.exitcode)
        shown = f"error: rank {rank} failed with {message['message']} (its traceback is above)"
        return code, message.get("extraInfo", {}).get("line", shown)
    return (code, "" if code == EXIT_USER_ERROR else f"error: rank {rank} {end_text(failure)}")


def end_text(failure: ProcessFailure) -> str:
    """Return a text that says how a process ended that wrote no error file."""
    if failure.exitcode >= 0:
        return f"ended with exit code {failure.exitcode}"
    name = failure.signal_name()
    hints = {
        "SIGKILL": "; Linux does so when memory runs out",
        "SIGABRT": "; NCCL does so when a collective takes longer than timeout_s, after torch's "
        "flight recorder has written the collectives of each rank",
    }
    return f"was killed by {name}{hints.get(name, '')}"
