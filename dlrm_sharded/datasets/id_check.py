"""Compares the ids of batches with the rows of their tables, before they go to a device.

FBGEMM looks up row 0 in place of an id that is out of range, and says so only on stderr. With row
blocks, TorchRec looks up another row. Here every plan looks up row 0, and the run logs it.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torchrec.datasets.utils import Batch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_sharded.plans.tables import Table, tables_by_feature

BOUNDS = ("warn", "error", "ignore")
"""Ids that are out of range lead to a warning or an error, or are not checked at all."""

UNSIGNED = {torch.int32: np.uint32, torch.int64: np.uint64}
"""As these types, negative ids are beyond every table, so that one maximum finds both kinds."""


@dataclass(frozen=True, slots=True)
class IdFault:
    """Ids of one feature that are out of range, or lengths that contradict the ids, in one batch.

    Args:
        table: name of the table; None if the lengths are wrong.
        count: number of the ids.
        text: what is wrong, as a clause to which the place is appended.
        is_fatal: whether the run must end, as for ids below 0 and wrong lengths.
    """

    table: str | None
    count: int
    text: str
    is_fatal: bool


def find_faults(
    features: KeyedJaggedTensor, tables: Mapping[str, Table], num_samples: int | None = None
) -> list[IdFault]:
    """Return what is wrong with the ids of features.

    Args:
        tables: the table of each feature; features without one are left out.
        num_samples: number of lengths that each feature must have; None for any number.
    """
    keys, ids, lengths = features.keys(), features.values().cpu(), features.lengths().cpu()
    total, shortest = int(lengths.sum()), int(lengths.min()) if lengths.numel() else 0
    if ids.dtype not in UNSIGNED:
        text = f"ids are {ids.dtype}, while lookups take {' or '.join(map(str, UNSIGNED))}"
        return [IdFault(None, ids.numel(), text, is_fatal=True)]
    given = None if num_samples is None else len(keys) * num_samples
    if given not in (None, lengths.numel()) or shortest < 0 or total != ids.numel():
        text = (
            f"the {lengths.numel():,} lengths of {len(keys)} features sum to {total:,} (the "
            f"smallest is {shortest:,}), while there are {ids.numel():,} ids"
        )
        return [IdFault(None, ids.numel(), text, is_fatal=True)]
    unsigned, ends = ids.numpy().view(UNSIGNED[ids.dtype]), features.offset_per_key()
    return [
        _fault(key, ids[begin:end], tables[key])
        for key, begin, end in zip(keys, ends, ends[1:], strict=False)
        if begin < end and key in tables and unsigned[begin:end].max() >= tables[key].num_embeddings
    ]


def _fault(feature: str, ids: torch.Tensor, table: Table) -> IdFault:
    num_negative = int((ids < 0).sum())
    count = num_negative or int((ids >= table.num_embeddings).sum())
    kind = f"beyond its {table.num_embeddings:,} rows ({count:,}, up to {int(ids.max()):,})"
    if num_negative:
        kind = f"below 0 ({count:,}, down to {int(ids.min()):,})"
    text = f"feature {feature!r} of table {table.name!r} has ids {kind}"
    return IdFault(table.name, count, text, is_fatal=num_negative > 0)


class IdCheck:
    """Checks the batches of a stream, in the thread that reads them.

    Args:
        tables: the tables of all features of the batches.
        bounds: one of `BOUNDS`; "error" makes every fault fatal.
    """

    def __init__(self, tables: Sequence[Table], bounds: str) -> None:
        self.bounds = bounds
        self._tables = tables_by_feature(tables)
        self._found: deque[tuple[int, IdFault]] = deque()

    def __call__(self, batch: Batch, number: int) -> Batch:
        """Record the faults of a batch, and return it with id 0 in place of wrong ids.

        A batch with wrong lengths loses its ids.

        Args:
            number: number of the batch, by which `take` finds its faults.
        """
        if self.bounds == "ignore":
            return batch
        features, num_samples = batch.sparse_features, len(batch.dense_features)
        faults = find_faults(features, self._tables, num_samples)
        if not faults:
            return batch
        self._found.extend(
            (number, dataclasses.replace(one, is_fatal=one.is_fatal or self.bounds == "error"))
            for one in faults
        )
        right = self._with_row_zero(features, num_samples, has_ids=faults[0].table is not None)
        return Batch(batch.dense_features, right, batch.labels)

    def take(self, until: int) -> list[tuple[int, IdFault]]:
        """Return the faults of the batches before number `until`, each once, with their numbers."""
        taken = []
        while self._found and self._found[0][0] < until:
            taken.append(self._found.popleft())
        return taken

    def forget(self, since: int) -> None:
        """Forget the faults of the batches from number `since` on, which are read again."""
        self._found = deque(found for found in self._found if found[0] < since)

    def _with_row_zero(
        self, features: KeyedJaggedTensor, num_samples: int, *, has_ids: bool
    ) -> KeyedJaggedTensor:
        keys, values, lengths = features.keys(), features.values(), features.lengths()
        if has_ids:
            rows = torch.tensor([self._tables[key].num_embeddings for key in keys])
            limits = rows.repeat_interleave(torch.tensor(features.length_per_key()))
            values = values.where((values >= 0) & (values < limits), 0)
        else:
            values, lengths = values[:0], lengths.new_zeros(len(keys) * num_samples)
        return KeyedJaggedTensor(keys, values, lengths=lengths, stride=num_samples)
