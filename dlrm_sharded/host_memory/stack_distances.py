"""Stack distances of accesses to one table: how large a cache each access needs to hit.

Mattson et al. (IBM Systems Journal, 1970): an access hits an LRU cache of C rows if fewer than C
other rows are at least as recent, and this number, its stack distance, gives the hits of all sizes
at once. FBGEMM's cache works by batches: it looks up the unique ids of a batch, then inserts the
missing rows in place of those whose last batch is the longest ago. So an access is one unique id of
one batch, its distance counts the rows that were used after it in the batches before, and rows of
one batch, which are equally recent, leave in the order of a hash.

Counting needs no tree: rows used since p are the accesses since p, less those that were repeated
before the batch in question. Repetitions are counted for all accesses at once, one bit of the
batch number after another, as in a merge sort.

Letters: N accesses, M repeated accesses.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]

NEVER = -1
"""Distance of the first access to a row."""

_TIE_SALT, _SAMPLE_SALT = 0x9E3779B97F4A7C15, 0xD1B54A32D192ED03


@dataclass(frozen=True, slots=True)
class Accesses:
    """Accesses to the rows of one table, batch after batch.

    Args:
        distance: [N], rows used more recently, of those that were sampled; `NEVER` at first use.
        batch: [N], number of each access's batch.
        num_batches: number of batches, also of those without accesses.
        sampling_rate: share of the rows that were sampled.
    """

    distance: NDArray[np.int64]
    batch: NDArray[np.int64]
    num_batches: int
    sampling_rate: float = 1.0


class AccessRecorder:
    """Records the ids of successive batches, and measures their stack distances.

    With a sampling rate below 1, only rows with a small hash are followed, all of their accesses
    (SHARDS: Waldspurger et al., FAST 2015). Their distances are as much too small as the sample. As
    a row counts once in a batch, however popular, the sample needs no correction for popular rows.

    Args:
        sampling_rate: share of the rows to follow.
    """

    def __init__(self, sampling_rate: float = 1.0) -> None:
        self._sampling_rate = sampling_rate
        self._stream: list[Ids] = []

    def add(self, ids: Ids) -> None:
        """Record a batch, whose ids [N] may repeat."""
        unique = np.unique(ids).astype(np.int64)
        if self._sampling_rate < 1.0:
            limit = np.uint64(int(self._sampling_rate * 2.0**64))
            unique = unique[_hash(unique, _SAMPLE_SALT) < limit]
        # the order within a batch decides which of equally recent rows leaves first
        self._stream.append(unique[np.argsort(_hash(unique, _TIE_SALT))])

    def measure(self) -> Accesses:
        """Return the accesses of all batches."""
        sizes = np.array([len(ids) for ids in self._stream], dtype=np.int64)
        batch = np.repeat(np.arange(len(sizes)), sizes)
        ids = np.concatenate([np.zeros(0, dtype=np.int64), *self._stream])
        return Accesses(_distances(ids, batch, sizes), batch, len(sizes), self._sampling_rate)


def _distances(ids: Ids, batch: NDArray[np.int64], sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return [N], the stack distances of a stream in which no batch has an id twice."""
    previous = _previous(ids)
    repeats = np.flatnonzero(previous >= 0)
    since, repeat_batch = previous[repeats], batch[repeats]
    first_of_batch = np.cumsum(sizes) - sizes
    # repeated accesses in all batches before this one
    num_repeats = np.searchsorted(repeat_batch, repeat_batch)
    nested = num_repeats - _num_earlier_smaller(since, repeat_batch, len(ids))
    distance = np.full(len(ids), NEVER, dtype=np.int64)
    distance[repeats] = first_of_batch[repeat_batch] - since - 1 - nested
    return distance


def _previous(ids: Ids) -> NDArray[np.int64]:
    """Return [N], the place of the previous access to the same id; -1 if there is none."""
    order = np.argsort(ids, kind="stable")
    is_same = ids[order[1:]] == ids[order[:-1]]
    previous = np.full(len(ids), -1, dtype=np.int64)
    previous[order[1:][is_same]] = order[:-1][is_same]
    return previous


def _num_earlier_smaller(
    values: NDArray[np.int64], batch: NDArray[np.int64], num_values: int
) -> NDArray[np.int64]:
    """Return [M], for each element the number of elements of earlier batches with smaller values.

    Args:
        values: [M], all different, from 0 to num_values - 1.
        batch: [M], which does not fall.
    """
    element_of_value = np.full(num_values, -1, dtype=np.int64)
    element_of_value[values] = np.arange(len(values))
    # Elements in order of value, then grouped by ever more bits of the batch: of the two halves of
    # a group, all elements of the one are in earlier batches than those of the other.
    element = element_of_value[element_of_value >= 0]
    count = np.zeros(len(values), dtype=np.int64)
    for bit in reversed(range(int(batch.max(initial=0)).bit_length())):
        prefix = batch[element] >> bit
        is_late = (prefix & 1).astype(bool)
        first = np.flatnonzero(np.diff(prefix >> 1, prepend=-1))
        sizes = np.diff(first, append=len(element))
        num_early = np.concatenate([[0], np.cumsum(~is_late)])
        before = np.repeat(num_early[first], sizes)
        early_in_group = num_early[1:] - before
        count[element[is_late]] += early_in_group[is_late]
        # each group's early elements come first, both in the order in which they were
        start = np.repeat(first, sizes)
        all_early = np.repeat(num_early[first + sizes] - num_early[first], sizes)
        late_place = all_early + np.arange(len(element)) - early_in_group
        grouped = np.empty_like(element)
        grouped[np.where(is_late, late_place, start + early_in_group - 1)] = element
        element = grouped
    return count


def _hash(ids: Ids, salt: int) -> NDArray[np.uint64]:
    """Return [N], 64 well-mixed bits of each id (the finalizer of splitmix64)."""
    bits = ids.astype(np.uint64) + np.uint64(salt)
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))
