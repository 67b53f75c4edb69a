"""Agreement between ranks: what one rank returns or raises, all ranks return or raise.

It also detects ranks that were not started alike: a different config on one host would train a
different model.

must_match: values by name, such as the values of a config by key, that must be equal on all ranks
of a job.
"""

from __future__ import annotations

import pickle
import socket
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias, TypeVar, cast

import torch.distributed as dist
from torch.distributed import distributed_c10d

from dlrm_sharded.files.errors import RankError, UnlikeRanksError, UserError, shortened
from dlrm_sharded.ranks.job_store import JobStore, listed, ranks_text

T = TypeVar("T")
E = TypeVar("E", bound=Exception)
Found: TypeAlias = tuple[str, Mapping[str, Any]]
"""The host of a rank, and its values by name, which other ranks must match."""

POLL_S = 0.1
"""Time between two checks of whether rank 0 has finished work of unknown length."""


def on_rank_zero(fn: Callable[[], T], *, group: dist.ProcessGroup | None = None) -> T:
    """Run `fn` on rank 0 only; every rank returns its result or raises its exception."""
    source = 0 if group is None else dist.get_global_rank(group, 0)
    error: Exception | None = None
    sent: list[Any] = [None, None]
    if dist.get_rank() == source:
        try:
            sent[0] = fn()
            pickle.dumps(sent[0])  # fails here rather than in the broadcast, in which others wait
        except Exception as raised:
            error, sent = raised, [None, _sendable(raised)]
    dist.broadcast_object_list(sent, src=source, group=group)
    if (error := error or sent[1]) is not None:
        raise error from RankError(
            error, failed_rank=source, reporter=source, on_all_ranks=group is None
        )
    return cast(T, sent[0])


def patiently_on_rank_zero(fn: Callable[[], T]) -> T:
    """Do what `on_rank_zero` does, for work of unknown length, such as converting a dataset.

    The other ranks poll the job's store until rank 0 has finished, because a collective would fail
    after the timeout of its group. They do not block in the store, because watchdogs share it.
    """
    # Stores may outlive a restart of the ranks, so each call has a unique key.
    key = on_rank_zero(lambda: f"finished_{uuid.uuid4().hex}")
    store = distributed_c10d._get_default_store()

    def work() -> T:
        try:
            return fn()
        finally:
            store.set(key, "")

    while dist.get_rank() != 0 and not store.check([key]):
        time.sleep(POLL_S)
    return on_rank_zero(work)


@contextmanager
def all_or_none(*, group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Leave the block on all ranks, or raise the error of the first failing rank on all of them.

    The error's cause is a `RankError`; rank 0 of the group reports it. The block must not contain
    collectives, in which ranks that succeed would wait for those that failed.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as raised:
        error = raised
    errors: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(errors, None if error is None else _sendable(error), group=group)
    failed = next((rank for rank, other in enumerate(errors) if other is not None), None)
    if failed is None:
        return
    if error is None or failed != dist.get_rank(group):
        error = errors[failed]
    failed, first = (r if group is None else dist.get_global_rank(group, r) for r in (failed, 0))
    raise error from RankError(
        error, failed_rank=failed, reporter=first, on_all_ranks=group is None
    )


def as_reported_by_rank_zero(error: E) -> E:
    """Mark an error that all ranks raise alike, so that only rank 0 reports it."""
    error.__cause__ = RankError(error, failed_rank=0, reporter=0, on_all_ranks=True)
    return error


def _sendable(error: Exception) -> Exception:
    """Return the error, or one with its message if it cannot be pickled.

    The cause of an error is not pickled, so a UserError in Hydra's wrapper replaces the wrapper.
    """
    if isinstance(error.__cause__, UserError):
        error = error.__cause__
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # a class can raise anything when it is pickled or built again
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def check_before_group(must_match: Mapping[str, Any], job: JobStore) -> None:
    """Compare the values of all ranks through the job's store, before a process group exists.


    Ranks that differ may not be able to form a group, for example if one of them finds no GPU.

    Raises:
        UnlikeRanksError: ranks differ; all ranks raise it.
    """
    _refuse_differences(
        job.from_all_ranks("must_match", (socket.gethostname(), must_match)),
        "the ranks were not started alike",
        "give all ranks the same overrides, and install the same versions on all hosts",
    )


def check_in_group(must_match: Mapping[str, Any]) -> None:
    """Compare what ranks have found in the data; a collective of all ranks.

    Raises:
        UnlikeRanksError: ranks differ; all ranks raise it.
    """
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, (socket.gethostname(), must_match))
    _refuse_differences(found, "the ranks do not read the same data", "give all hosts equal files")


def _refuse_differences(found: Sequence[Found], problem: str, cure: str) -> None:
    if differences := differences_text(found):
        raise as_reported_by_rank_zero(UnlikeRanksError(f"{problem}: {differences}; {cure}"))


def differences_text(found: Sequence[Found]) -> str:
    """Return which values differ between ranks, and on which hosts; empty if none does."""
    texts = []
    for name in sorted({name for _, values in found for name in values}):
        ranks_by_value: dict[str, list[int]] = {}
        for rank, (_, values) in enumerate(found):
            value = repr(values[name]) if name in values else ""
            ranks_by_value.setdefault(value, []).append(rank)
        texts_of_values = [
            f"{shown(found[ranks[0]][1], name)} on "
            f"{ranks_text(ranks, [found[rank][0] for rank in ranks])}"
            for ranks in ranks_by_value.values()
        ]
        if len(texts_of_values) > 1:
            texts.append(f"{name} is {' and '.join(texts_of_values)}")
    return listed(texts, "; ")


def shown(values: Mapping[str, Any], name: str) -> str:
    """Return a value as messages show it; it may be missing."""
    return shortened(values[name]) if name in values else "missing"
