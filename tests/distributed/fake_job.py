"""Run the ranks of a job one after the other in this process, and record their collectives.

Nothing is sent. So a rank never waits, no device is needed, and a job of 16 ranks is cheap. NCCL
waits for ever if two ranks issue the collectives that they share in another order, or with other
sizes; `disagreement` finds that in the records.

What a rank receives stands for what others would send:

- Results that all ranks of a group share (of an all-reduce, an all-gather, a broadcast) are those
  of the rank that ran first, so ranks decide alike where they decide by such a result.
- Other ranks send ids and their numbers like this rank's own, so all ranks must have equal batches.
- Other ranks send vectors of zeros, and the own ones become zeros too, so losses stay equal.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _create_work_from_future
from torch.distributed import distributed_c10d
from torch.futures import Future
from torchrec.distributed import collective_utils, comm

from dlrm_sharded.ranks.distributed import Rank

BACKEND = "recorded"

ONCE_PER_PROCESS = (
    (comm, "_INTRA_PG", None),
    (comm, "_CROSS_PG", None),
    (collective_utils, "_INITIALIZED", False),
)
"""TorchRec has these notes of collectives that it issues for the first model of a process only."""


@dataclass(frozen=True)
class Collective:
    """One call on one rank.

    Args:
        group: name of the group, which counts the groups that were made before.
        ranks: members of the group, numbered in the job.
        sends, receives: numbers of elements to and from each member.
        detail: what else must be equal on all members, such as the dtype.
    """

    name: str
    group: str
    ranks: tuple[int, ...]
    sends: tuple[int, ...]
    receives: tuple[int, ...]
    detail: str = ""

    def fits(self, other: "Collective", *, mine: int, others: int) -> bool:
        """Return whether two ranks of the job take part in the same collective."""
        same = ("name", "group", "ranks", "detail")
        if any(getattr(self, key) != getattr(other, key) for key in same):
            return False
        here, there = self.ranks.index(mine), self.ranks.index(others)
        return (
            self.sends[there] == other.receives[here] and self.receives[there] == other.sends[here]
        )


def disagreement(by_rank: Sequence[Sequence[Collective]]) -> str | None:
    """The first collective that two ranks share and do not issue alike, in words; None if none."""
    for a, b in itertools.combinations(range(len(by_rank)), 2):
        ours = [c for c in by_rank[a] if b in c.ranks]
        theirs = [c for c in by_rank[b] if a in c.ranks]
        for i, (x, y) in enumerate(itertools.zip_longest(ours, theirs)):
            if x is None or y is None or not x.fits(y, mine=a, others=b):
                return f"collective {i} of ranks {a} and {b}:\n{x}\n{y}"
    return None


def run_in_turn(
    fn: Callable[[Rank], Any], world_size: int, *, local_world_size: int | None = None
) -> tuple[list[list[Collective]], list[Any]]:
    """The collectives of every rank, and what `fn(rank)` returned on it.

    Raises:
        AssertionError: a rank failed after it had issued a collective that others had not.
    """
    local_world_size = local_world_size or world_size
    shared: dict[Any, list[Tensor]] = {}
    store = dist.HashStore()
    by_rank, returned = [], []
    for number in range(world_size):
        local_rank = number % local_world_size
        rank = Rank(number, world_size, local_rank, local_world_size, torch.device("cpu"))
        records: list[Collective] = []
        with pytest.MonkeyPatch.context() as patch:
            for key in ("rank", "world_size", "local_rank", "local_world_size"):
                patch.setenv(key.upper(), str(getattr(rank, key)))
            for module, name, unset in ONCE_PER_PROCESS:
                patch.setattr(module, name, unset, raising=False)
            patch.setattr(_RecordedGroup, "records", records)
            patch.setattr(_RecordedGroup, "shared", shared)
            _record_new_groups(patch, records, world_size)
            dist.init_process_group(BACKEND, store=store, rank=number, world_size=world_size)
            try:
                returned.append(fn(rank))
            except Exception as error:
                # A rank that is out of step takes other results than its own for its own.
                if (found := disagreement([*by_rank, records])) is not None:
                    raise AssertionError(found) from error
                raise
            finally:
                dist.destroy_process_group()
        by_rank.append(records)
    return by_rank, returned


def _record_new_groups(
    patch: pytest.MonkeyPatch, records: list[Collective], world_size: int
) -> None:
    """Under NCCL all ranks make a group together, those outside of it too."""
    new_group = distributed_c10d._new_group_with_tag
    everyone = tuple(range(world_size))
    nothing = (0,) * world_size

    def recorded(ranks: Any = None, timeout: Any = None, backend: Any = None, *a: Any, **k: Any):
        members = list(everyone) if ranks is None else sorted(ranks)
        detail = f"{members} {backend or BACKEND}"
        records.append(Collective("new_group", "", everyone, nothing, nothing, detail))
        return new_group(ranks, timeout, BACKEND, *a, **k)

    patch.setattr(distributed_c10d, "_new_group_with_tag", recorded)


class _RecordedGroup(dist.ProcessGroup):
    """A group of one process that stands for all its ranks."""

    records: ClassVar[list[Collective]] = []
    shared: ClassVar[dict[Any, list[Tensor]]] = {}

    def __init__(self, options: Any) -> None:
        super().__init__(options.group_rank, options.group_size)
        self._name = options.group_id
        self._ranks = tuple(options.global_ranks_in_group) or tuple(range(options.group_size))
        self._num_calls = 0

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Any:
        operation = _operation(opts)
        key = self._record_alike("all_reduce", tensors, operation)
        if operation == "SUM":
            for tensor in tensors:
                tensor.mul_(self.size())
        self._share(key, tensors)
        return _done(tensors)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> Any:
        return self.allreduce(tensors, opts)

    def barrier(self, opts: Any = None) -> Any:
        self._record_alike("barrier", [])
        return _done([])

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> Any:
        root = 0 if opts is None else opts.rootRank
        self._share(self._record_alike("broadcast", tensors, f"root {root}"), tensors)
        return _done(tensors)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Any:
        [received], [sent] = outputs, inputs
        key = self._record(
            "all_gather", [sent.numel()] * self.size(), [r.numel() for r in received], sent
        )
        for tensor in received:
            tensor.copy_(sent)
        self._share(key, received)
        return _done(outputs)

    def all_gather_single(self, output: Tensor, sent: Tensor, opts: Any = None) -> Any:
        return self.allgather([list(output.view(-1).chunk(self.size()))], [sent.view(-1)])

    def reduce_scatter(
        self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None
    ) -> Any:
        [received], [sent] = outputs, inputs
        self._record(
            "reduce_scatter", [s.numel() for s in sent], [received.numel()] * self.size(), received
        )
        received.zero_()
        return _done(outputs)

    def reduce_scatter_single(self, output: Tensor, sent: Tensor, opts: Any = None) -> Any:
        return self.reduce_scatter([output], [list(sent.view(-1).chunk(self.size()))])

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        self._record(
            "all_to_all", [i.numel() for i in inputs], [o.numel() for o in outputs], outputs[0]
        )
        if outputs[0].is_floating_point():
            for tensor in outputs:
                tensor.zero_()
        else:
            for tensor in outputs:
                tensor.copy_(inputs[self.rank()])
        return _done(outputs)

    def all_to_all_single(
        self,
        output: Tensor,
        sent: Tensor,
        output_splits: list[int] | None,
        input_splits: list[int] | None,
        opts: Any = None,
    ) -> Any:
        def split(tensor: Tensor, splits: list[int] | None) -> list[Tensor]:
            return list(tensor.split(splits) if splits else tensor.chunk(self.size()))

        self.alltoall(split(output, output_splits), split(sent, input_splits))
        return _done([output])

    def _record_alike(self, name: str, tensors: list[Tensor], detail: str = "") -> Any:
        sizes = [sum(tensor.numel() for tensor in tensors)] * self.size()
        return self._record(name, sizes, sizes, tensors[0] if tensors else None, detail)

    def _record(
        self,
        name: str,
        sends: list[int],
        receives: list[int],
        tensor: Tensor | None,
        detail: str = "",
    ) -> Any:
        """Return what names the call on all members."""
        detail = f"{detail} {'' if tensor is None else tensor.dtype}".strip()
        collective = Collective(
            name, self._name, self._ranks, tuple(sends), tuple(receives), detail
        )
        self.records.append(collective)
        self._num_calls += 1
        return self._name, self._ranks, self._num_calls, name

    def _share(self, key: Any, tensors: list[Tensor]) -> None:
        """Take the result of the member that ran first; ranks whose sizes differ keep theirs."""
        first = self.shared.setdefault(key, [tensor.clone() for tensor in tensors])
        for tensor, result in zip(tensors, first, strict=False):
            if tensor.shape == result.shape:
                tensor.copy_(result)


def _operation(opts: Any) -> str:
    if opts is None:
        return "SUM"
    names = ("SUM", "AVG", "PRODUCT", "MIN", "MAX")
    [name] = [n for n in names if opts.reduceOp == getattr(dist.ReduceOp, n)]
    return name


def _done(result: Any) -> Any:
    future: Future[Any] = Future()
    future.set_result(result)
    return _create_work_from_future(future)


dist.Backend.register_backend(
    BACKEND, lambda options, _: _RecordedGroup(options), extended_api=True, devices=["cpu"]
)
