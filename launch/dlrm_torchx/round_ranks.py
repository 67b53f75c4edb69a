"""Runs the jobs of a sweep in rounds, on the ranks.

All combinations of the sweep run in these processes: each trains once, and then all are measured
again in rounds, each in a new random order.
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
"""File in a run's mailbox with the number of times that the run was started."""

MAX_STARTS = 2
"""Largest number of starts of a run: if it ended all ranks twice, it is left out."""

COMPILED_FOR = ("batch_size", "data", "model", "trainer")
"""Config keys on which the compiled layers of a run depend."""

_compiled_for = ""


def run_rounds(folder: Path, rank: int) -> None:
    """Train the runs that are not trained yet, then measure all in rounds."""
    order = RoundsOrder.read(folder)
    mailboxes = [JobMailbox(Path(box)) for box in order.mailboxes]
    with exit_codes(), process_group(timeout_s=order.timeout_s):
        for mailbox in mailboxes:
            if on_rank_zero(functools.partial(_may_begin, mailbox)):
                returned = run_in_turn(mailbox, rank)
                if returned is not None and rank == 0:
                    mailbox.send_return(returned)

        def measure(number: int, attempt: int) -> None:
            begin = functools.partial(order.begin, folder, number, attempt=attempt)
            for place, run in on_rank_zero(begin):
                in_round = functools.partial(_in_round, number=number, attempt=attempt, place=place)
                run_in_turn(mailboxes[run], rank, in_round)

        for number in range(order.num_rounds):
            measure(number, attempt=0)
            for disturbed in on_rank_zero(order.to_repeat):
                measure(disturbed, attempt=1)


def _may_begin(mailbox: JobMailbox) -> bool:
    """Return whether a run has to be trained, and count its start."""
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
    """Make a run's call; return None if it ended with the same error on all ranks.

    A run that was stopped after a checkpoint has not failed: it ends these ranks, and continues
    when they are restarted.
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
    """Make layers compile as in a new process, if the last call had different ones.

    torch treats sizes that changed as dynamic, and compiles at most eight variants.
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
