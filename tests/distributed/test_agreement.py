"""Ranks agree: what one of them raises, all of them raise; what they find together, all have."""

import functools
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dlrm_sharded.files.errors import ConfigError, DataError, InfeasibleTaskError, RankError
from dlrm_sharded.hardware.detect import detect_hardware
from dlrm_sharded.plans.task import Topology
from dlrm_sharded.ranks.agreement import (
    all_or_none,
    check_in_group,
    on_rank_zero,
    patiently_on_rank_zero,
)
from dlrm_sharded.ranks.device_memory import with_memory_of_all_ranks
from dlrm_sharded.ranks.distributed import Rank
from dlrm_sharded.ranks.job_store import wait_for_all_ranks
from dlrm_sharded.training.metrics import Evaluation, Evaluator
from tests.preloaded.ranks import gathered, run_ranks
from tests.unit.training.test_metrics import normalized_entropy

pytestmark = pytest.mark.slow

WORLD_SIZE = 2
RunOnZero = Callable[[Callable[[], Any]], Any]


class TwoPartsError(Exception):
    """Pickles, but does not unpickle: it is built again from one argument."""

    def __init__(self, what: str, why: str) -> None:
        super().__init__(f"{what}: {why}")


def local_error(message: str) -> Exception:
    class LocalError(Exception):
        """Cannot be pickled at all."""

    return LocalError(message)


def raise_on_rank_zero(rank: Rank, error: Exception, run: RunOnZero = on_rank_zero) -> None:
    def fail() -> None:
        assert rank.is_zero, "ran on another rank"
        raise error

    run(fail)


def raise_alone(rank: Rank, errors: dict[int, Exception]) -> None:
    with all_or_none():
        if rank.rank in errors:
            raise errors[rank.rank]


HOST = socket.gethostname()
UNLIKE = (
    f"the ranks do not read the same data: rows is 5 on rank 0 ({HOST}) and 6 on rank 1 ({HOST}); "
    "give all hosts equal files"
)
FULL, CUT = InfeasibleTaskError("no memory"), DataError("it is cut")
CASES: dict[str, tuple[Callable[[Rank], None], tuple[str, ...]]] = {
    "rank_zero-ours": (
        lambda rank: raise_on_rank_zero(rank, FULL),
        ("InfeasibleTaskError: no memory",) * 2,
    ),
    "rank_zero-two_parts": (
        lambda rank: raise_on_rank_zero(rank, TwoPartsError("file", "gone")),
        ("TwoPartsError: file: gone", "RuntimeError: TwoPartsError: file: gone"),
    ),
    "rank_zero-patiently": (
        lambda rank: raise_on_rank_zero(rank, CUT, patiently_on_rank_zero),
        ("DataError: it is cut",) * 2,
    ),
    "all-on_1": (lambda rank: raise_alone(rank, {1: CUT}), ("DataError: it is cut",) * 2),
    "all-on_both": (
        lambda rank: raise_alone(rank, {0: ConfigError("0"), 1: CUT}),
        ("ConfigError: 0",) * 2,
    ),
    "all-local_on_1": (
        lambda rank: raise_alone(rank, {1: local_error("odd")}),
        ("RuntimeError: LocalError: odd", "LocalError: odd"),
    ),
    "all-on_none": (lambda rank: raise_alone(rank, {}), ()),
    "data-alike": (lambda rank: check_in_group({"rows": 5}), ()),
    "data-unlike": (
        lambda rank: check_in_group({"rows": 5 + rank.rank}),
        (f"UnlikeRanksError: {UNLIKE}",) * 2,
    ),
}
"""Maps what ranks do to what rank 0 and rank 1 raise then; rank 0 reports it."""


MEMORY = {
    "equal": (10**12 + 5, 10**12 + 5),
    "noise": (10**12 + 5, 10**12 + 4),
    "just_alike": (10**6, 990_000),
    "different": (10**6, 989_999),
    "first_is_less": (2**59 + 1, 2**60),
}
"""What the two ranks find for themselves."""


def fail_in_every_way(rank: Rank) -> dict[str, Any]:
    outcomes = {}
    for name, (case, _) in CASES.items():
        outcome = None
        try:
            case(rank)
        except Exception as error:
            source = error.__cause__
            elsewhere = isinstance(source, RankError) and source.reporter != rank.rank
            outcome = f"{type(error).__name__}: {error}", elsewhere
        outcomes[name] = gathered(rank, outcome)
    outcomes["result"] = gathered(rank, on_rank_zero(lambda: {"made_by": rank.rank}))
    outcomes["evaluation"] = gathered(rank, evaluated(rank))
    outcomes["figures"] = gathered(rank, [*detected(rank), *detected(rank)])
    for name, memory in MEMORY.items():
        topology = with_memory_of_all_ranks(Topology(WORLD_SIZE, memory[rank.rank]))
        found = topology.memory_bytes, topology.memory_bytes_by_rank
        outcomes[f"memory-{name}"] = gathered(rank, found)
    return outcomes


LOGITS = torch.tensor([-2.0, 0.5, -1.0, 0.25, 1.5, -0.5, 2.0, 1.0])
LABELS = torch.tensor([0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 1.0, 1.0])
"""The first half, which is the share of rank 0 of 2, has one class only."""


def evaluated(rank: Rank) -> Evaluation:
    evaluator = Evaluator(rank.device)
    share = slice(4 * rank.rank, 4 * rank.rank + 4)
    evaluator.update(LOGITS[share], LABELS[share])
    return evaluator.compute()


def detected(rank: Rank) -> list[float]:
    """Figures of the hardware: a second call may have what a cache keeps."""
    probe = detect_hardware(rank).probe
    exchange = probe.exchange
    sizes = [exchange.num_ranks, exchange.ranks_per_host]
    return [*sizes, exchange.latency_us, exchange.gb_per_s, probe.gather_gb_per_s]


def wait_without_a_collective(rank: Rank, folder: str) -> list[Any]:
    """For each of three calls: the result, and whether the work was done at the second broadcast.

    The first broadcast agrees on a key. Whoever is in the second one waits under a timeout.
    """
    broadcast = torch.distributed.broadcast_object_list
    found = []
    for call in range(3):
        is_done, seen = Path(folder) / str(call), []

        def work(is_done: Path = is_done, call: int = call) -> int:
            time.sleep(0.5)
            is_done.touch()
            return call

        def observed(
            *arguments: Any, is_done: Path = is_done, seen: list[bool] = seen, **options: Any
        ) -> None:
            seen.append(is_done.exists())
            broadcast(*arguments, **options)

        torch.distributed.broadcast_object_list = observed
        try:
            result = patiently_on_rank_zero(work)
        finally:
            torch.distributed.broadcast_object_list = broadcast
        found.append(gathered(rank, (result, seen[1])))
    return found


def test_a_long_wait_is_in_no_collective(tmp_path):
    """A collective would end with an error after the timeout of its group."""
    found = run_ranks(wait_without_a_collective, WORLD_SIZE, str(tmp_path))
    assert found == [[(call, True)] * WORLD_SIZE for call in range(3)]


def meet_without_a_group(rank: Rank) -> list[list[tuple[float, float]]]:
    """When each rank began and ended to wait, in three meetings, as after restarts of torchrun."""
    start = torch.distributed.init_process_group
    times = []
    for attempt in range(3):
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(attempt)
        torch.distributed.init_process_group = None
        time.sleep(0.5 * rank.rank)
        began = time.monotonic()
        wait_for_all_ranks(60)
        ended = time.monotonic()
        torch.distributed.init_process_group = start
        times.append(gathered(rank, (began, ended)))
    return times


def test_ranks_wait_for_all_others():
    for times in run_ranks(meet_without_a_group, 3):
        assert max(began for began, _ in times) <= min(ended for _, ended in times)


@functools.cache
def outcomes() -> dict[str, Any]:
    """All cases in one start of the processes."""
    return run_ranks(fail_in_every_way, WORLD_SIZE)


@pytest.mark.parametrize("name", CASES)
def test_errors_reach_every_rank(name):
    expected = [(error, rank > 0) for rank, error in enumerate(CASES[name][1])]
    assert outcomes()[name] == (expected or [None, None])


def test_ranks_evaluate_together():
    first, second = outcomes()["evaluation"]
    assert first == second
    assert (first.auroc, first.num_samples) == (1.0, 8)
    assert first.normalized_entropy == pytest.approx(normalized_entropy(LOGITS, LABELS), rel=1e-5)


def test_all_ranks_have_the_figures_of_rank_0():
    first, second = outcomes()["figures"]
    assert first == second
    assert first[:2] == [2, 2]
    assert min(first) > 0


def test_every_rank_gets_the_result_of_rank_zero():
    assert outcomes()["result"] == [{"made_by": 0}] * WORLD_SIZE


@pytest.mark.parametrize("name", MEMORY)
def test_memory_of_all_ranks(name):
    """Exact, and rank by rank only where it matters; the same on every rank."""
    by_rank = MEMORY[name] if name in ("different", "first_is_less") else None
    assert outcomes()[f"memory-{name}"] == [(min(MEMORY[name]), by_rank)] * WORLD_SIZE
