"""The agent of a launcher, which starts and watches the ranks of one host.

torchrun's own agent tries a mistake of the user again, and knows of no mistake that another host
has found. When its ranks have ended well, it waits 300 s for agents that may be gone, deaf to
signals. When they have not, it takes the store with it that other agents use.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from torch.distributed import Store, launcher
from torch.distributed.elastic.agent.server import WorkerGroup
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

from dlrm_sharded.ranks.attempt import RESTARTS_VARIABLE
from dlrm_sharded.ranks.store_questions import QUESTION_S, StoreQuestions

T = TypeVar("T")

POLL_S = 0.1
"""Time between two looks at whether other agents have ended."""

OTHERS_LOOK_S = 1.0
"""Time that an agent stays when all have ended, so that the others see it in the store."""

LIMIT_AFTER_SUCCESS_S = 300.0
LIMIT_AFTER_END_S = 10.0
LIMIT_AFTER_SIGNAL_S = 4.0
"""Time that an agent waits for the others: after the ranks' success, after any other end, when
another agent may be gone, and after a signal, when its ranks may have taken 25 of 30 s already."""

ENDED, MISTAKE = "dlrm_sharded_ended", "dlrm_sharded_mistake"
"""Keys of the agents' store: the number of agents that have ended, and an error of the user."""


class UserErrorOfRanksError(Exception):
    """Ranks ended with an error that they would end with again; the message is its line."""


@dataclass(frozen=True)
class RanksOfHost:
    """Knows for a launcher how the ranks of its host have ended.

    Args:
        mistake: returns the line of an error of the user that a rank has ended with, which may be
            empty; None for none.
        were_preempted: returns whether ranks have ended after a signal and a checkpoint.
        say_restart: says that the ranks start again, for this time.
    """

    mistake: Callable[[], str | None]
    were_preempted: Callable[[], bool]
    say_restart: Callable[[int], None]


class HostAgent(LocalElasticAgent):
    """An agent that ends with those of the other hosts, for the same reason."""

    def __init__(self, ranks: RanksOfHost, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._ranks = ranks
        self._questions = StoreQuestions(QUESTION_S)
        self._num_starts = 0
        self._has_ended = False

    def end_with_others(self, limit_s: float) -> None:
        """Wait until the agents of all hosts have ended, but no longer than this."""
        num_agents = self.get_worker_group().group_world_size or 1
        if self._has_ended or self._store is None or num_agents == 1:
            return
        self._has_ended = True
        deadline = time.monotonic() + limit_s
        mistake = self._ranks.mistake()
        if mistake is not None:
            self._ask(lambda store: store.set(MISTAKE, mistake), None)
        num_ended = self._ask(lambda store: store.add(ENDED, 1), None)
        while num_ended is not None and num_ended < num_agents and time.monotonic() < deadline:
            time.sleep(POLL_S)
            num_ended = self._ask(lambda store: store.add(ENDED, 0), None)
        if num_ended == num_agents:
            time.sleep(OTHERS_LOOK_S)

    def _ask(self, question: Callable[[Store], T], otherwise: T) -> T:
        """Return what the agents' store answers; `otherwise` if it is gone or cannot be reached."""
        store = self._store
        assert store is not None, "the agents have met"
        try:
            return self._questions.ask(lambda: question(store), otherwise)
        except RuntimeError:  # it is gone, with the agent that served it
            return otherwise

    def _initialize_workers(self, worker_group: WorkerGroup) -> None:
        if self._num_starts:
            mistake = self._ranks.mistake()
            if mistake is None and self._ask(lambda store: store.check([MISTAKE]), False):
                mistake = self._ask(lambda store: store.get(MISTAKE).decode(), None)
            if mistake is not None:
                raise UserErrorOfRanksError(mistake)
            self._ranks.say_restart(self._num_starts)
            os.environ[RESTARTS_VARIABLE] = str(self._num_starts)
        self._num_starts += 1
        super()._initialize_workers(worker_group)

    def _exit_barrier(self) -> None:
        was_preempted = self._ranks.were_preempted()
        self.end_with_others(LIMIT_AFTER_END_S if was_preempted else LIMIT_AFTER_SUCCESS_S)


def use_host_agent(ranks: RanksOfHost) -> list[HostAgent]:
    """Let torch's launcher make our agents; return the list to which it adds them."""
    made: list[HostAgent] = []

    def make(**arguments: Any) -> HostAgent:
        made.append(HostAgent(ranks, **arguments))
        return made[-1]

    launcher.api.LocalElasticAgent = make  # type: ignore[assignment,misc]
    return made
