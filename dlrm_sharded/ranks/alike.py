"""Finds out whether all ranks were started alike: another config on one host trains another model.

facts: values by their names, such as those of a config by their keys, that ranks must have alike.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist

from dlrm_sharded.files.errors import UnlikeRanksError, shortened
from dlrm_sharded.ranks.agreement import reported_by_rank_zero
from dlrm_sharded.ranks.job_store import listed, ranks_text


def check_before_group(
    facts: Mapping[str, Any], store: dist.Store, rank: int, world_size: int
) -> None:
    """Compare facts of all ranks through the job's store, before a process group exists.

    Ranks that differ may not be able to form a group, such as one that finds no GPU.

    Raises:
        UnlikeRanksError: ranks differ; all ranks raise it.
    """
    store.set(f"rank_{rank}", json.dumps([socket.gethostname(), facts], default=str))
    if rank == 0:
        texts = store.multi_get([f"rank_{r}" for r in range(world_size)])
        store.set("differences", differences_text([json.loads(text) for text in texts]))
    if differences := store.get("differences").decode():
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
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, (socket.gethostname(), facts))
    if differences := differences_text(found):
        raise reported_by_rank_zero(
            UnlikeRanksError(
                f"the ranks do not read the same data: {differences}; give all hosts equal files"
            )
        )


def differences_text(found: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """Say which facts differ between ranks, and on which hosts; empty if none does.

    Args:
        found: host and facts of each rank.
    """
    texts = []
    for name in sorted({name for _, facts in found for name in facts}):
        ranks_by_value: dict[str, list[int]] = {}
        for rank, (_, facts) in enumerate(found):
            value = repr(facts[name]) if name in facts else ""
            ranks_by_value.setdefault(value, []).append(rank)
        values = [
            f"{shown(found[ranks[0]][1], name)} on "
            f"{ranks_text(ranks, [found[rank][0] for rank in ranks])}"
            for ranks in ranks_by_value.values()
        ]
        if len(values) > 1:
            texts.append(f"{name} is {' and '.join(values)}")
    return listed(texts, "; ")


def shown(facts: Mapping[str, Any], name: str) -> str:
    """Return a fact as messages show it, which may be missing."""
    return shortened(facts[name]) if name in facts else "not there"
