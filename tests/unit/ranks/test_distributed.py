"""A job of one process, and what a rank knows of itself and its memory."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from dlrm_sharded.files.errors import ConfigError, DivergenceError, InfeasibleTaskError, RankError
from dlrm_sharded.plans.task import GIB, Topology
from dlrm_sharded.ranks import distributed
from dlrm_sharded.ranks.distributed import (
    Rank,
    all_or_none,
    detect_topology,
    on_rank_zero,
    patiently_on_rank_zero,
    process_group,
    rank_from_environment,
    reported_by_rank_zero,
    with_memory_of_all_ranks,
)

SECOND_HOST = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}


@pytest.fixture(autouse=True)
def no_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for key in (*SECOND_HOST, "MASTER_ADDR"):
        monkeypatch.delenv(key, raising=False)


@pytest.fixture
def alone() -> Iterator[Rank]:
    with process_group() as rank:
        yield rank


@pytest.fixture
def cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def free_gib(monkeypatch: pytest.MonkeyPatch, cpu: None) -> int:
    """Memory that the host is said to have."""
    monkeypatch.setattr(distributed, "available_host_bytes", lambda: 100 * GIB)
    return 100


@pytest.mark.usefixtures("cpu")
def test_rank_without_torchrun() -> None:
    assert rank_from_environment() == Rank(0, 1, 0, 1, torch.device("cpu"))


@pytest.mark.usefixtures("cpu")
def test_rank_under_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for key, value in SECOND_HOST.items():
        monkeypatch.setenv(key, value)
    rank = rank_from_environment()
    assert rank == Rank(5, 8, 1, 4, torch.device("cpu"))
    assert not rank.is_zero


def test_group_ends_with_its_block() -> None:
    for _ in range(2):
        with process_group() as rank:
            assert torch.distributed.is_initialized()
            assert rank.is_zero
        assert not torch.distributed.is_initialized()


def test_group_ends_after_an_error(cpu: None) -> None:
    with pytest.raises(KeyError), process_group():
        raise KeyError
    assert not torch.distributed.is_initialized()


def fail_with(error: Exception) -> Callable[[], None]:
    def fail() -> None:
        raise error

    return fail


def all_or_nothing(fn: Callable[[], None]) -> None:
    with all_or_none():
        fn()


ON_ALL_RANKS: dict[str, Callable[[Callable[[], Any]], Any]] = {
    "on_rank_zero": on_rank_zero,
    "patiently_on_rank_zero": patiently_on_rank_zero,
    "all_or_none": all_or_nothing,
}


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("run", [on_rank_zero, patiently_on_rank_zero])
def test_the_result_of_rank_zero(run: Callable[[Callable[[], Any]], Any]) -> None:
    assert run(lambda: (1, "a")) == (1, "a")
    assert run(lambda: None) is None


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("name", ON_ALL_RANKS)
def test_errors_pass_unchanged(name: str) -> None:
    error, cause = InfeasibleTaskError("no room"), KeyError("why")
    error.__cause__ = cause
    with pytest.raises(InfeasibleTaskError) as raised:
        ON_ALL_RANKS[name](fail_with(error))
    assert raised.value is error
    assert isinstance(error.__cause__, RankError)
    assert (error.__cause__.failed_rank, error.__cause__.reporter) == (0, 0)
    assert error.__cause__.__cause__ is cause


@pytest.fixture
def left_groups(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The groups that were left, in a process that believes to have a GPU and NCCL."""
    left: list[str] = []
    start, leave = torch.distributed.init_process_group, distributed._leave_group

    def start_on_cpu(*, backend: str, device_id: torch.device, **options: Any) -> None:
        assert (backend, device_id) == ("nccl", torch.device("cuda", 0))
        start(backend="gloo", **options)

    monkeypatch.setattr(distributed, "device_type", lambda: "cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(torch.distributed, "init_process_group", start_on_cpu)
    monkeypatch.setattr(distributed, "_leave_group", lambda: (left.append("nccl"), leave()))
    yield left
    if torch.distributed.is_initialized():
        leave()


@pytest.mark.parametrize("name", ON_ALL_RANKS)
def test_nccl_ends_properly_after_an_error_of_all_ranks(name: str, left_groups: list[str]) -> None:
    with pytest.raises(ConfigError), process_group():
        ON_ALL_RANKS[name](fail_with(ConfigError("bad")))
    assert left_groups == ["nccl"]


def test_nccl_ends_properly_after_a_divergence(left_groups: list[str]) -> None:
    with pytest.raises(DivergenceError), process_group():
        raise reported_by_rank_zero(DivergenceError("nan"))
    assert left_groups == ["nccl"]


def test_nccl_is_left_alone_after_an_error_of_one_rank(left_groups: list[str]) -> None:
    """Others may wait for this rank, and to leave NCCL's group would be to wait for them."""
    with pytest.raises(KeyError), process_group():
        raise KeyError
    assert left_groups == []


def test_nccl_is_left_alone_after_an_error_of_a_smaller_group(left_groups: list[str]) -> None:
    with pytest.raises(ConfigError), process_group():
        on_rank_zero(
            fail_with(ConfigError("bad")), group=torch.distributed.new_group(backend="gloo")
        )
    assert left_groups == []


@pytest.mark.usefixtures("alone")
def test_all_or_none_lets_success_pass() -> None:
    done = []
    with all_or_none():
        done.append(1)
    assert done == [1]


@pytest.mark.usefixtures("alone")
def test_memory_of_one_rank() -> None:
    topology = Topology(1, 80 * GIB + 1)
    assert with_memory_of_all_ranks(topology) == topology


def test_rank_0_reports_what_all_have() -> None:
    error, cause = ConfigError("bad"), ValueError("worse")
    error.__cause__ = cause
    assert reported_by_rank_zero(error) is error
    assert isinstance(error.__cause__, RankError)
    assert error.__cause__.reporter == 0
    assert error.__cause__.__cause__ is cause, "the traceback still shows it"


def test_topology_of_one_process(free_gib: int) -> None:
    topology = detect_topology(memory_fraction=0.25)
    assert topology.world_size == topology.ranks_per_host == 1
    assert topology.compute_device == "cpu"
    assert topology.memory_bytes == free_gib * GIB // 4
    assert topology.intra_host_bytes_per_s is None
    assert topology.inter_host_bytes_per_s is None


def test_topology_of_two_hosts(free_gib: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks of a host share its memory."""
    for key, value in SECOND_HOST.items():
        monkeypatch.setenv(key, value)
    topology = detect_topology(memory_fraction=1, intra_host_gb_per_s=300, inter_host_gb_per_s=25)
    assert (topology.world_size, topology.ranks_per_host) == (8, 4)
    assert topology.memory_bytes == free_gib * GIB // 4
    assert topology.intra_host_bytes_per_s == 300e9
    assert topology.inter_host_bytes_per_s == 25e9


@pytest.mark.usefixtures("free_gib")
@pytest.mark.parametrize("memory_gib", [0.5, 56, 1000])
def test_memory_that_is_given_is_not_detected(memory_gib: float) -> None:
    assert detect_topology(memory_gib=memory_gib).memory_bytes == memory_gib * GIB


@pytest.mark.parametrize(
    ("options", "gib"),
    [
        ({"memory_fraction": 0.5, "reserved_gib": 8}, 42),
        ({"memory_fraction": 0.5, "reserved_gib": 49.5}, 0.5),
        ({"memory_gib": 56, "reserved_gib": 0.25}, 55.75),
        ({"memory_gib": 56, "reserved_gib": 0}, 56),
    ],
    ids=str,
)
def test_reserved_memory(free_gib: int, options: dict[str, float], gib: float) -> None:
    assert free_gib == 100
    assert detect_topology(**options).memory_bytes == gib * GIB


@pytest.mark.usefixtures("free_gib")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"memory_fraction": 0.5, "reserved_gib": 50}, r"50\.00 GiB of rank 0 .*memory_fraction"),
        ({"memory_gib": 2, "reserved_gib": 3.5}, r"is 3\.5.*2\.00 GiB of rank 0 .*memory_gib"),
    ],
    ids=str,
)
def test_nothing_left(options: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=rf"topology\.reserved_gib .*{message}"):
        detect_topology(**options)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("reserved_gib", -0.5),
        ("reserved_gib", float("inf")),
        ("memory_gib", 0),
        ("memory_gib", -1.5),
        ("memory_gib", float("nan")),
        ("memory_fraction", 0),
        ("memory_fraction", 1.1),
        ("memory_fraction", float("nan")),
    ],
    ids=str,
)
def test_bad_memory(key: str, value: float) -> None:
    with pytest.raises(ConfigError, match=rf"topology\.{key} is {value}, must be"):
        detect_topology(**{key: value})


def test_what_a_process_uses(alone: Rank) -> None:
    used, available = distributed.used_and_available_bytes(alone)
    assert 2**26 < used < 2**40
    assert 0 < available < 2**62
