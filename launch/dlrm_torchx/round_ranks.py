"""The ranks of a sweep run its jobs in rounds.

All combinations of the sweep run in these processes: each trains once, and then all are measured
again in rounds, in an order that is drawn anew for each round.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn
from hydra.utils import get_method
from omegaconf import DictConfig

from dlrm_sharded.commands.exit_codes import RANK_EXIT_PREEMPTED, ReportedExit, exit_codes
from dlrm_sharded.ranks.agreement import on_rank_zero
from dlrm_sharded.ranks.distributed import process_group
from dlrm_torchx.mailbox import HydraCall, JobMailbox
from dlrm_torchx.round_order import RoundsOrder

STARTS = "starts"
"""File in the mailbox of a run with the number of times that it was begun."""

MAX_STARTS = 2
"""How often a run is begun: one that has ended all ranks twice is left out."""

COMPILED_FOR = ("batch_size", "data", "model", "trainer")
"""Keys of a config that the compiled layers of its run depend on."""

_compiled_for = ""


def run_rounds(folder: Path, rank: int) -> None:
    """Train what is not trained yet, then measure."""
    order = RoundsOrder.read(folder)
    mailboxes = [JobMailbox(Path(box)) for box in order.mailboxes]
    with exit_codes(), process_group(timeout_s=order.timeout_s):
        for mailbox in mailboxes:
            if on_rank_zero(functools.partial(_may_begin, mailbox)):
                returned = run_in_turn(mailbox, rank)
                if returned is not None and rank == 0:
                    mailbox.send_return(returned)

        def measure(number: int, attempt: int) -> None:
            unmeasured = functools.partial(order.unmeasured, number, attempt=attempt)
            for place, run in on_rank_zero(unmeasured):
                in_round = functools.partial(_in_round, number=number, attempt=attempt, place=place)
                run_in_turn(mailboxes[run], rank, in_round)

        for number in range(order.num_rounds):
            measure(number, attempt=0)
            for disturbed in on_rank_zero(order.to_repeat):
                measure(disturbed, attempt=1)


def _may_begin(mailbox: JobMailbox) -> bool:
    """Return whether a run is to be trained, and count the attempt."""
    if mailbox.has_return() or mailbox.receive_first_failure() is not None:
        return False
    path = mailbox.folder / STARTS
    starts = int(path.read_text()) if path.exists() else 0
    if starts >= MAX_STARTS:
        mailbox.send_failure(0, f"it has ended all ranks {starts} times")
        return False
    path.write_text(str(starts + 1))
    return True


def run_in_turn(
    mailbox: JobMailbox, rank: int, changed: Callable[[HydraCall], HydraCall] = lambda call: call
) -> JobReturn | None:
    """Make a run's call; return None if it ended with an error that all ranks have.

    A run that was stopped after a checkpoint has not failed: it ends these ranks, and goes on when
    they start again.
    """
    try:
        call = mailbox.receive_call()
        _forget_other_layers(call.config)
        return changed(call).run(rank)
    except ReportedExit as ended:
        if ended.code == RANK_EXIT_PREEMPTED and rank == 0:
            (mailbox.folder / STARTS).unlink(missing_ok=True)
        if ended.code == RANK_EXIT_PREEMPTED or not ended.is_agreed:
            raise
        mailbox.send_failure(rank, ended.reason)
        return None
    finally:
        gc.collect()  # sharded modules are in reference cycles


def _forget_other_layers(config: DictConfig) -> None:
    """Let layers be compiled as in a process of their own, if those of the last call were others.

    torch takes sizes that differ for variable ones, and compiles no more than eight variants.
    """
    global _compiled_for
    before, _compiled_for = _compiled_for, repr([config.get(key) for key in COMPILED_FOR])
    dynamo = sys.modules.get("torch._dynamo")  # which takes seconds to load
    if dynamo is not None and _compiled_for != before:
        dynamo.reset()


def _in_round(call: HydraCall, *, number: int, attempt: int, place: int) -> HydraCall:
    """Return the call that measures a run in a round."""
    function = get_method(call.config.round)

    def task(cfg: Any) -> None:
        with exit_codes():
            function(cfg, number, place, attempt)

    return dataclasses.replace(call, function=task)
