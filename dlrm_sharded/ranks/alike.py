"""Finds out whether all ranks were started alike: another config on one host trains another model.

facts: values by their names, such as those of a config by their keys, that ranks must have alike.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from dlrm_sharded.files.errors import ConfigError, UnlikeRanksError, shortened
from dlrm_sharded.ranks.agreement import reported_by_rank_zero

MAX_NAMED = 5
"""Differences, and hosts of a difference, that a message names."""

READERS_LIMIT = timedelta(seconds=10)
"""Time that rank 0 stays for the others to read how ranks differ; one of them may have ended."""

MISSING = "not there"
"""A message says this of a fact that a rank does not have."""


def check_before_group(
    facts: Mapping[str, Any], store: dist.Store, rank: int, world_size: int
) -> None:
    """Compare facts of all ranks through the job's store, before a process group exists.

    Ranks that differ may not be able to form a group, such as one that finds no GPU.

    Raises:
        ConfigError: two processes are this rank.
        UnlikeRanksError: ranks differ; all ranks raise it.
    """
    # Without a launcher, a rank of another job may have come to this job's port.
    if "TORCHELASTIC_RUN_ID" not in os.environ and store.add(f"number_{rank}", 1) > 1:
        raise ConfigError(
            f"rank {rank} on {socket.gethostname()} is there twice: two jobs have the "
            "MASTER_ADDR and MASTER_PORT of one; give each job a port of its own"
        )
    text, digest = _text_and_digest(facts)
    if not store.check([digest]):
        store.set(digest, text)
    store.set(f"rank_{rank}", json.dumps([digest, socket.gethostname()]))
    if rank == 0:  # equal ranks cost it one small value each
        found = [json.loads(store.get(f"rank_{r}")) for r in range(world_size)]
        known = {of_rank: json.loads(store.get(of_rank)) for of_rank, _ in found}
        hosts = [host for _, host in found]
        same = len(known) == 1
        text = "" if same else differences_text([known[d] for d, _ in found], hosts)
        store.set("differences", json.dumps(text))
    if differences := json.loads(store.get("differences")):
        if store.add("readers", 1) == world_size:
            store.set("all_have_read", "")
        if rank == 0:  # its process may serve the store to the others
            with suppress(dist.DistStoreError):
                store.wait(["all_have_read"], READERS_LIMIT)
        raise reported_by_rank_zero(
            UnlikeRanksError(
                f"the ranks were not started alike: {differences}; give all ranks the same "
                "overrides, and install the same versions on all hosts"
            )
        )


def check_in_group(facts: Mapping[str, Any]) -> None:
    """Compare what ranks have found in the data; a collective of all ranks.

    Raises:
        UnlikeRanksError: ranks differ; all ranks raise it.
    """
    text, digest = _text_and_digest(facts)
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, (digest, socket.gethostname()))
    hosts = [host for _, host in found]
    if len({of_rank for of_rank, _ in found}) > 1:
        dist.all_gather_object(found, text)
        differences = differences_text([json.loads(of_rank) for of_rank in found], hosts)
        raise reported_by_rank_zero(
            UnlikeRanksError(
                f"the ranks do not read the same data: {differences}; give all hosts equal files"
            )
        )


def _text_and_digest(facts: Mapping[str, Any]) -> tuple[str, str]:
    text = json.dumps(facts, sort_keys=True, default=str)
    return text, hashlib.sha256(text.encode()).hexdigest()


def differences_text(facts: Sequence[Mapping[str, Any]], hosts: Sequence[str]) -> str:
    """Say which facts differ between ranks, and on which hosts; empty if none does.

    Args:
        facts, hosts: of each rank.
    """
    texts = []
    for name in sorted({name for of_rank in facts for name in of_rank}):
        ranks_by_value: dict[str, list[int]] = {}
        shown = {MISSING: MISSING}
        for rank, of_rank in enumerate(facts):
            value = repr(of_rank[name]) if name in of_rank else MISSING
            if name in of_rank:
                shown[value] = shortened(of_rank[name])
            ranks_by_value.setdefault(value, []).append(rank)
        if len(ranks_by_value) > 1:
            values = [f"{shown[v]} on {_place(r, hosts)}" for v, r in ranks_by_value.items()]
            texts.append(f"{name} is {' and '.join(values)}")
    return listed(texts, "; ")


def listed(texts: Sequence[str], separator: str) -> str:
    """Join texts, of which so many are named and all others counted."""
    more = len(texts) - MAX_NAMED
    return separator.join([*texts[:MAX_NAMED], *([f"{more} more"] if more > 0 else [])])


def _place(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    of_ranks = listed(list(dict.fromkeys(hosts[rank] for rank in ranks)), ", ")
    if len(ranks) == 1:
        return f"rank {ranks[0]} ({of_ranks})"
    return f"{len(ranks)} ranks from {ranks[0]} to {ranks[-1]} ({of_ranks})"
