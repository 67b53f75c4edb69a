"""The program of every rank of a sweep in rounds: `python -m dlrm_torchx.round_worker FOLDER`.

All combinations of the sweep run in these processes: each trains once, and then all are measured
again in rounds, in an order that is drawn anew for each round.
"""

from __future__ import annotations

import functools
import gc
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn
from hydra.utils import get_method
from omegaconf import DictConfig

from dlrm_sharded.commands.exit_codes import EXIT_PREEMPTED, ReportedExit, exit_codes
from dlrm_sharded.ranks.agreement import on_rank_zero
from dlrm_sharded.ranks.distributed import process_group
from dlrm_sharded.ranks.process import die_with_parent
from dlrm_torchx.mailbox import HydraCall, JobMailbox
from dlrm_torchx.round_order import RoundsOrder, mailbox_of
from dlrm_torchx.worker import attempt_mailbox, run_call

log = logging.getLogger(__name__)

STARTS = "starts"
"""File in the mailbox of a run with the number of times that it was begun."""

MAX_STARTS = 2
"""How often a run is begun: one that has ended all ranks twice is left out."""

COMPILED_FOR = ("batch_size", "data", "model", "trainer")
"""Keys of a config that the compiled layers of its run depend on."""

_compiled_for = ""


def main(folder: Path) -> None:
    """Train what is not trained yet, then measure; only rank 0 logs, writes and reports."""
    die_with_parent()
    rank = int(os.environ["RANK"])
    with attempt_mailbox(folder, rank) as mailbox:
        _run(RoundsOrder.read(folder), rank)
        if rank == 0:
            mailbox.send_return(JobReturn())


def _run(order: RoundsOrder, rank: int) -> None:
    with exit_codes(), process_group(timeout_s=order.timeout_s):
        for box in order.mailboxes:
            mailbox = mailbox_of(box)
            if on_rank_zero(functools.partial(_may_begin, mailbox)):
                returned = _done(mailbox, rank, lambda call: call)
                if returned is not None and rank == 0:
                    mailbox.send_return(returned)
        for number in range(order.num_rounds):
            _measure(order, rank, number, attempt=0)
            for disturbed in on_rank_zero(order.to_repeat):
                _measure(order, rank, disturbed, attempt=1)


def _measure(order: RoundsOrder, rank: int, number: int, *, attempt: int) -> None:
    """Measure the runs that an attempt at a round has still to measure."""
    unmeasured = functools.partial(order.unmeasured, number, attempt=attempt)
    for place, run in on_rank_zero(unmeasured):
        in_round = functools.partial(_in_round, number=number, attempt=attempt, place=place)
        _done(mailbox_of(order.mailboxes[run]), rank, in_round)


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


def _done(
    mailbox: JobMailbox, rank: int, changed: Callable[[HydraCall], HydraCall]
) -> JobReturn | None:
    """Make a run's call; return None if it ended with an error that all ranks have.

    A run that was stopped after a checkpoint has not failed: it ends these ranks, and goes on when
    they start again.
    """
    try:
        call = mailbox.receive_call()
        _forget_other_layers(call.config)
        return run_call(changed(call), rank)
    except ReportedExit as ended:
        if ended.code == EXIT_PREEMPTED and rank == 0:
            (mailbox.folder / STARTS).unlink(missing_ok=True)
        if ended.code == EXIT_PREEMPTED or not ended.is_agreed:
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

    return HydraCall(task, call.config, call.hydra_context, call.singletons)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
