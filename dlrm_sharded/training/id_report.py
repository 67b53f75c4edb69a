"""Reports ids that are out of their table's range: once for each table, summed over the ranks."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence

import torch.distributed as dist

from dlrm_sharded.datasets.id_check import IdFault
from dlrm_sharded.files.errors import DataError
from dlrm_sharded.ranks.agreement import as_reported_by_rank_zero
from dlrm_sharded.ranks.distributed import Rank, new_group

log = logging.getLogger(__name__)


class IdReport:
    """Gathers what the ranks have found in their batches.

    Args:
        counts: numbers of such ids found before, by table.
    """

    def __init__(self, rank: Rank, counts: Mapping[str, int]) -> None:
        self.counts = Counter(counts)
        self._rank = rank
        self._reported: set[str] = set()
        self._group: dist.ProcessGroup | None = None

    def gather(self, found: Sequence[tuple[str, IdFault]]) -> bool:
        """Add the faults of all ranks, which call it together; return whether there are any.

        Args:
            found: faults of this rank, each with its place in words, such as "at step 3".

        Raises:
            DataError: one of them is fatal; all ranks raise it.
        """
        if self._group is None and self._rank.device.type == "cuda":
            self._group = new_group(backend="gloo")  # on the host, to avoid waiting for a GPU
        of_ranks: list[list[tuple[str, IdFault]]] = [[] for _ in range(self._rank.world_size)]
        dist.all_gather_object(of_ranks, list(found), group=self._group)
        for rank, faults in enumerate(of_ranks):
            for place, fault in faults:
                text = f"{fault.text}, {place} on rank {rank}"
                if fault.is_fatal or fault.table is None:
                    raise as_reported_by_rank_zero(DataError(f"{text}; fix the data"))
                self.counts[fault.table] += fault.count
                if fault.table not in self._reported and self._rank.is_zero:
                    log.warning(
                        "%s; row 0 is looked up for them, and the next ones are counted only "
                        "(ids_out_of_range in result.json; data.bounds=error ends the run)",
                        text,
                    )
                self._reported.add(fault.table)
        return any(of_ranks)
