"""Ranks that were started with different configs or versions are distinguished, and their hosts."""

import threading
import time
from collections.abc import Mapping
from typing import Any

import pytest
import torch.distributed as dist

from dlrm_sharded.files.errors import RankError, UnlikeRanksError
from dlrm_sharded.ranks import agreement
from dlrm_sharded.ranks.agreement import check_before_group, differences_text
from tests.unit.ranks.jobs import JobOfThreads

COMMON = {"seed": 0, "data.alpha": 0.9}


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ([COMMON, COMMON, COMMON], ""),
        (
            [COMMON, COMMON | {"seed": 1}, COMMON],
            "seed is 0 on ranks 0, 2 (a, c) and 1 on rank 1 (b)",
        ),
        (
            [COMMON, COMMON | {"version of torch": "2.13"}, COMMON | {"seed": True}],
            "seed is 0 on ranks 0, 1 (a, b) and True on rank 2 (c); "
            "version of torch is missing on ranks 0, 2 (a, c) and '2.13' on rank 1 (b)",
        ),
    ],
    ids=["alike", "one_key", "a_key_of_one_rank"],
)
def test_differences_are_named_with_their_hosts(values, text):
    assert differences_text([*zip("abc", values, strict=True)]) == text


def outcomes(
    store: dist.Store, values: Mapping[int, dict[str, Any]]
) -> dict[int, Exception | None]:
    """What each rank of a job raises; one thread is one rank."""
    found: dict[int, Exception | None] = {}

    def run(rank: int) -> None:
        found[rank] = None
        try:
            check_before_group(values[rank], JobOfThreads(rank, len(values), store))
        except Exception as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in values]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_all_ranks_raise_the_same_and_rank_zero_reports(monkeypatch):
    monkeypatch.setattr(agreement.socket, "gethostname", lambda: "node7")
    found = outcomes(dist.HashStore(), {0: COMMON, 1: COMMON | {"seed": 1}, 2: COMMON})
    messages = {str(error) for error in found.values()}
    assert messages == {
        "the ranks were not started alike: seed is 0 on ranks 0, 2 (node7) and 1 on rank 1 "
        "(node7); give all ranks the same overrides, and install the same versions on all hosts"
    }
    for error in found.values():
        assert isinstance(error, UnlikeRanksError)
        assert isinstance(error.__cause__, RankError)
        assert (error.__cause__.reporter, error.__cause__.on_all_ranks) == (0, True)


class SlowReader(dist.PrefixStore):
    """A store of rank 1, which reads how ranks differ after rank 0 could have ended."""

    def multi_get(self, keys: list[str]) -> list[bytes]:
        time.sleep(0.5)
        self.rank_zero_waits = not self.has_ended
        return super().multi_get(keys)


def test_rank_zero_that_serves_the_store_ends_after_all_have_read():
    store = dist.HashStore()
    slow = SlowReader("", store)
    slow.has_ended = False

    def run_zero() -> None:
        with pytest.raises(UnlikeRanksError):
            check_before_group({"seed": 0}, JobOfThreads(0, 2, dist.PrefixStore("", store)))
        slow.has_ended = True

    rank_zero = threading.Thread(target=run_zero)
    rank_zero.start()
    with pytest.raises(UnlikeRanksError):
        check_before_group({"seed": 1}, JobOfThreads(1, 2, slow))
    rank_zero.join()
    assert slow.rank_zero_waits
    assert slow.has_ended


def test_ranks_alike_go_on():
    assert outcomes(dist.HashStore(), {0: COMMON, 1: {**COMMON}}) == {0: None, 1: None}
