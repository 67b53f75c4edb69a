"""A job of one process, and what a rank knows of itself and its memory."""

import contextlib
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from dlrm_sharded.files.errors import ConfigError, DivergenceError, InfeasibleTaskError, RankError
from dlrm_sharded.plans.task import GIB
from dlrm_sharded.plans.topology_settings import TopologySettings
from dlrm_sharded.ranks import device_memory, distributed
from dlrm_sharded.ranks.agreement import (
    all_or_none,
    as_reported_by_rank_zero,
    on_rank_zero,
    patiently_on_rank_zero,
)
from dlrm_sharded.ranks.distributed import (
    Rank,
    detect_topology,
    leave_group,
    new_group,
    new_group_of,
    process_group,
    rank_from_environment,
)

pytestmark = pytest.mark.usefixtures("no_torchrun")
SECOND_HOST = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}


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
    monkeypatch.setattr(device_memory, "available_host_bytes", lambda: 100 * GIB)
    return 100


@pytest.mark.usefixtures("cpu")
def test_a_rank_and_its_launcher(monkeypatch):
    assert rank_from_environment() == Rank(0, 1, 0, 1, torch.device("cpu"))
    for key, value in SECOND_HOST.items():
        monkeypatch.setenv(key, value)
    rank = rank_from_environment()
    assert rank == Rank(5, 8, 1, 4, torch.device("cpu"))
    assert not rank.is_zero


def test_a_block_within_a_block_is_of_its_group(alone):
    """Several runs of one process share it, also after one of them has failed."""
    with pytest.raises(ConfigError), process_group() as rank:
        raise ConfigError("the run has no data")
    assert rank == alone
    assert torch.distributed.is_initialized()


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
def test_the_result_of_rank_zero(run):
    assert run(lambda: (1, "a")) == (1, "a")
    assert run(lambda: None) is None


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("name", ON_ALL_RANKS)
def test_errors_pass_unchanged(name):
    error, cause = InfeasibleTaskError("no memory"), KeyError("why")
    error.__cause__ = cause
    with pytest.raises(InfeasibleTaskError) as raised:
        ON_ALL_RANKS[name](Mock(side_effect=error))
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


def test_products_of_measurements_are_rounded_as_in_trainings(left_groups, tf32):
    """Whatever a process with a GPU measures, it measures as trainings multiply by default."""
    tf32(False)
    with process_group():
        assert tf32()
    assert left_groups == ["nccl"]


def fail_alone() -> None:
    raise KeyError


def diverge() -> None:
    raise as_reported_by_rank_zero(DivergenceError("nan"))


def fail_in_a_smaller_group() -> None:
    group = torch.distributed.new_group(backend="gloo")
    on_rank_zero(Mock(side_effect=ConfigError("bad")), group=group)


@pytest.mark.parametrize(
    ("fail", "error", "left"),
    [
        (diverge, DivergenceError, ["nccl"]),
        (fail_alone, KeyError, []),
        (fail_in_a_smaller_group, ConfigError, []),
    ],
)
def test_nccl_is_left_if_all_ranks_fail(fail, error, left, left_groups):
    """After an error of some, others may wait for them, and to leave would be to wait for those."""
    with pytest.raises(error), process_group():
        fail()
    assert left_groups == left


class Model:
    """A model in a reference cycle, as sharded ones are."""

    def __init__(self) -> None:
        self.itself = self


def test_models_are_gone_before_the_group_of_nccl(left_groups, monkeypatch):
    """Their graphs would keep it. The frames of an error hold a model, and those of its causes."""
    models: list[weakref.ref[Model]] = []
    alive = []
    leave = torch.distributed.destroy_process_group

    def fail_with_a_model() -> None:
        model = Model()
        models.append(weakref.ref(model))
        raise KeyError

    def diverge_with_models() -> None:
        model = Model()
        models.append(weakref.ref(model))
        try:
            fail_with_a_model()
        except KeyError:
            diverge()

    def destroy() -> None:
        alive.extend(model for model in models if model() is not None)
        leave()

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "destroy_process_group", destroy)
    with pytest.raises(DivergenceError), process_group():
        diverge_with_models()
    assert left_groups == ["nccl"]
    assert len(models) == 2
    assert not alive


ENDS_ALONE = """
import atexit

import torch

atexit.register(print, "the interpreter ends the group")

from dlrm_sharded.commands.exit_codes import exit_codes
from dlrm_sharded.files.errors import ConfigError
from dlrm_sharded.ranks import device_memory, distributed

start = torch.distributed.init_process_group
torch.distributed.init_process_group = lambda backend, device_id, **others: start("gloo", **others)
distributed.device_type = lambda: "cuda"
torch.cuda.device_count = lambda: 1
torch.cuda.set_device = lambda _: None
with exit_codes(), distributed.process_group():
    raise {error}("no data")
"""


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [("ConfigError", 2, "error: no data\n"), ("RuntimeError", 1, "RuntimeError: no data\n")],
)
def test_a_rank_that_fails_alone_does_not_wait_for_nccl(error, code, said):
    """NCCL waits for other ranks, and for graphs, when the interpreter ends its group."""
    command = [sys.executable, "-c", ENDS_ALONE.format(error=error)]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (code, ""), ended.stderr
    assert ended.stderr.endswith(said)


def test_groups_of_some_ranks_have_the_timeout_of_the_job(monkeypatch):
    made, new = [], torch.distributed.new_group

    def recorded(ranks, *, backend, timeout):
        made.append((ranks, timeout))
        return new(ranks, backend=backend, timeout=timeout)

    monkeypatch.setattr(torch.distributed, "new_group", recorded)
    with process_group(timeout_s=77):
        group = new_group_of([0])
        leave_group(group)
    assert made == [([0], timedelta(seconds=77))]


def test_topology_of_two_hosts(free_gib, monkeypatch):
    """The ranks of a host share its memory."""
    for key, value in SECOND_HOST.items():
        monkeypatch.setenv(key, value)
    topology = detect_topology(
        TopologySettings(memory_fraction=1, intra_host_gb_per_s=300, inter_host_gb_per_s=25)
    )
    assert (topology.world_size, topology.ranks_per_host) == (8, 4)
    assert topology.memory_bytes == free_gib * GIB // 4
    assert topology.intra_host_bytes_per_s == 300e9
    assert topology.inter_host_bytes_per_s == 25e9


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
def test_reserved_memory(free_gib, options, gib):
    assert free_gib == 100
    assert detect_topology(TopologySettings(**options)).memory_bytes == gib * GIB


@pytest.mark.parametrize(
    ("error", "num_left"),
    [(None, 1), (ConfigError("on all ranks"), 1), (KeyError("on this rank"), 2)],
    ids=["done", "agreed", "alone"],
)
def test_further_groups_end_with_the_block_that_made_them(error, num_left):
    """Each has threads, and a sweep in rounds makes a model and its group for each measurement."""
    groups = torch.distributed.distributed_c10d._world.pg_names
    with process_group():
        new_group(backend="gloo")
        before = len(groups)
        with contextlib.suppress(ConfigError, KeyError), process_group():
            new_group(backend="gloo")
            if isinstance(error, ConfigError):
                with all_or_none():
                    raise error
            if error is not None:
                raise error
        assert len(groups) == before + num_left - 1
