"""How the steps of a training on GPUs run, by the times of the first ones."""

from collections.abc import Iterator

import pytest
import torch

from dlrm_sharded.ranks.distributed import Rank
from dlrm_sharded.training import step_choice
from dlrm_sharded.training.step_choice import (
    TRIAL_STEPS,
    AskedOptions,
    StepOptions,
    StepTimes,
    StepTrial,
    chosen_options,
    first_options,
    untried_options,
)
from tests.cuda import GPU, HOST_MS, Gpu, install_gpu

OPEN = AskedOptions(None, None, None)
BY_HOST, BY_GPU = StepTimes(7.6, 0.1, graph_fits=True), StepTimes(24.9, 16.0, graph_fits=True)


@pytest.mark.parametrize(
    ("times", "num_ranks", "expected"),
    [
        (BY_HOST, 1, StepOptions("base", "none", True)),
        (BY_HOST, 8, StepOptions("sparse_dist", "none", True)),
        (StepTimes(7.6, 0.1, graph_fits=False), 8, StepOptions("sparse_dist", "none", False)),
        (BY_GPU, 1, StepOptions("sparse_dist", "default", False)),
        (BY_GPU, 8, StepOptions("sparse_dist", "default", False)),
    ],
    ids=["host_1", "host_8", "host_without_memory", "gpu_1", "gpu_8"],
)
def test_what_is_chosen(times, num_ranks, expected):
    assert chosen_options(OPEN, times, num_ranks) == expected


@pytest.mark.parametrize(
    ("asked", "times", "expected"),
    [
        (("sparse_dist", None, None), BY_HOST, ("sparse_dist", "none", True)),
        ((None, "reduce-overhead", None), BY_HOST, ("base", "reduce-overhead", False)),
        ((None, "none", None), BY_GPU, ("sparse_dist", "none", False)),
        ((None, None, True), BY_GPU, ("sparse_dist", "none", True)),
        ((None, None, False), BY_HOST, ("base", "none", False)),
    ],
    ids=["pipeline", "graphs_of_layers", "not_compiled", "graph", "no_graph"],
)
def test_keys_override_it(asked, times, expected):
    assert AskedOptions(*asked).are_open
    assert chosen_options(AskedOptions(*asked), times, 1) == StepOptions(*expected)


def test_where_nothing_is_tried():
    assert untried_options(OPEN, torch.device("cpu")) == StepOptions("base", "none", False)
    assert untried_options(OPEN, GPU) == StepOptions("sparse_dist", "none", False)
    assert first_options(OPEN) == StepOptions("base", "none", True)
    assert str(first_options(OPEN)) == (
        "trainer.pipeline=base model.compile_mode=none model.dense_graph=true"
    )


@pytest.mark.parametrize(("free", "graph_fits"), [(70, True), (50, False)])
def test_a_graph_leaves_memory_for_a_step(free, graph_fits, monkeypatch):
    """The largest step held 40 on top of 100 that stay; torch holds 110, of which 10 are free."""
    held = {"memory_allocated": 100, "memory_reserved": 110, "max_memory_allocated": 140}
    for name, value in held.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 1000))
    assert step_choice._graph_fits(GPU) == graph_fits


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    gpu = Gpu()
    install_gpu(monkeypatch, gpu)
    monkeypatch.setattr(step_choice, "_graph_fits", lambda device: True)
    tensor = torch.tensor
    monkeypatch.setattr(step_choice.torch, "tensor", lambda data, device: tensor(data))
    monkeypatch.setattr(step_choice.dist, "all_reduce", lambda found, op: None)
    return gpu


@pytest.mark.parametrize(
    ("launch_ms", "device_ms", "num_kernels", "waits", "host_bounds"),
    [
        (7.0, 2.5, 10, False, True),
        (7.0, 2.5, 10, True, True),
        (7.0, 2.5, 1, True, True),
        (8.0, 24.0, 10, False, False),
        (8.0, 24.0, 10, True, False),
        (7.0, 8.5, 10, False, False),
    ],
    ids=["host", "host_waits", "updates_come_last", "gpu", "gpu_waits", "gpu_a_little"],
)
def test_who_bounds_a_step(gpu, launch_ms, device_ms, num_kernels, waits, host_bounds):
    """A wait at the begin of a step, as for the sizes of ids, keeps the host from running ahead."""
    trial = StepTrial(Rank(0, 1, 0, 1, GPU))
    kernel = gpu.stage(launch_ms / num_kernels, device_ms / num_kernels)
    for number in range(1, TRIAL_STEPS + 1):
        if waits:
            gpu.synchronize()
        for _ in range(num_kernels):
            kernel()
        assert trial.add() == (number == TRIAL_STEPS)
    times = trial.times()
    assert times.host_bounds == host_bounds
    assert times.step_ms > max(launch_ms, device_ms) - HOST_MS
    who = "host" if host_bounds else "GPU"
    assert str(times).startswith(f"the {who} bounds the steps, which take ")
