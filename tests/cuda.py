"""The stand-in for CUDA: a device with a clock, events, streams, memory and recorded graphs.

There are no kernels and no tensors on the device: FBGEMM and NCCL need a GPU, and `tests/gpu` has
them.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dlrm_sharded.measuring import launch_clock

GPU = torch.device("cuda", 0)
NAME = "NVIDIA H100 80GB HBM3"
TOTAL_BYTES, FREE_BYTES = 80 * 2**30, 50 * 2**30

CYCLES_PER_MS = 1_600_000
HOST_MS = 0.0625
"""The host takes this long between two looks at the clock, unless it works."""


class Gpu:
    """Calls in order, and a device and a host whose times follow from the calls.

    Args:
        raises_after_ms: work after which the device has raised its clock to its highest rate.
        idle_share: rate of the clock before that.
    """

    def __init__(self, *, raises_after_ms: float = 0.0, idle_share: float = 1.0) -> None:
        self.calls: list[Any] = []
        self.host_ms = 0.0
        self.device_ms = 0.0
        """When the device will have done what was queued so far."""
        self.cycles_per_ms = CYCLES_PER_MS
        self._raises_after_ms = raises_after_ms
        self._idle_share = idle_share
        self._busy_ms = 0.0

    def sleep(self, cycles: int) -> None:
        is_raised = self._busy_ms >= self._raises_after_ms
        sleep_ms = cycles / self.cycles_per_ms / (1.0 if is_raised else self._idle_share)
        self.calls.append(("sleep", pytest.approx(sleep_ms)))
        self.queue(sleep_ms)

    def queue(self, work_ms: float) -> None:
        self.device_ms = max(self.device_ms, self.host_ms) + work_ms
        self._busy_ms += work_ms

    def synchronize(self, device: Any = None) -> None:
        self.calls.append("synchronize")
        self.wait_until(self.device_ms)

    def wait_until(self, time_ms: float) -> None:
        self.host_ms = max(self.host_ms, time_ms)

    def perf_counter(self) -> float:
        self.host_ms += HOST_MS
        return self.host_ms / 1e3

    def stage(self, launch_ms: float, device_ms: float) -> Callable[[], str]:
        """A stage that the host launches and the device computes."""

        def work() -> str:
            self.calls.append("work")
            self.host_ms += launch_ms
            self.queue(device_ms)
            return "result"

        return work


class _Event:
    """An event that is reached when the device has done what was queued before it."""

    gpu: Gpu

    def __init__(self, *, enable_timing: bool = False) -> None:
        self._has_time = enable_timing

    def record(self, stream: Any = None) -> None:
        self.gpu.calls.append("event")
        self.gpu.queue(0.0)
        self.reached_ms = self.gpu.device_ms

    def query(self) -> bool:
        return self.reached_ms <= self.gpu.host_ms

    def synchronize(self) -> None:
        self.gpu.calls.append("wait")
        self.gpu.wait_until(self.reached_ms)

    def elapsed_time(self, end: "_Event") -> float:
        assert self._has_time
        assert end._has_time
        assert end.query(), "the device has not done what is before this event"
        return end.reached_ms - self.reached_ms


def events_of(gpu: Gpu) -> type[_Event]:
    """The class of the events of a GPU."""
    return type("Event", (_Event,), {"gpu": gpu})


def install_gpu(monkeypatch: pytest.MonkeyPatch, gpu: Gpu) -> None:
    """Let the host's clock, and what the project calls of `torch.cuda`, be those of `gpu`."""
    event_class = events_of(gpu)

    def record_event() -> _Event:
        event = event_class()
        event.record()
        return event

    stream = SimpleNamespace(synchronize=gpu.synchronize, record_event=record_event)
    for name, stand_in in {
        "Event": event_class,
        "_sleep": gpu.sleep,
        "synchronize": gpu.synchronize,
        "current_stream": lambda device=None: stream,
        "set_device": lambda device: gpu.calls.append(("set_device", device)),
        "device_count": lambda: 1,
        "get_device_name": lambda device=None: NAME,
        "mem_get_info": lambda device=None: (FREE_BYTES, TOTAL_BYTES),
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(launch_clock.time, "perf_counter", gpu.perf_counter)
    launch_clock._sleep_rate.cache_clear()


class Graph(TorchDispatchMode):
    """Calls the operators of a recording once more, into the tensors that they wrote at first.

    A CUDA graph, too, launches its kernels on the same addresses.
    """

    def __init__(self) -> None:
        super().__init__()
        self.num_replays = 0
        self._calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self._calls.append((func, args, kwargs or {}, out))
        return out

    @torch.no_grad()
    def replay(self) -> None:
        self.num_replays += 1
        for func, args, kwargs, out in self._calls:
            result = func(*args, **kwargs)
            if isinstance(out, Tensor) and result is not out:
                out.copy_(result)


def install_graphs(monkeypatch: pytest.MonkeyPatch) -> list[Graph]:
    """Let CUDA graphs be recordings of operators; return those that are made from now on."""
    found: list[Graph] = []

    def new_graph() -> Graph:
        found.append(Graph())
        return found[-1]

    @contextmanager
    def recording(graph: Graph, capture_error_mode: str) -> Iterator[None]:
        assert capture_error_mode == "thread_local"
        with graph:
            yield

    stream = SimpleNamespace(wait_stream=lambda other: None)
    for name, stand_in in {
        "CUDAGraph": new_graph,
        "graph": recording,
        "Stream": lambda: stream,
        "current_stream": lambda: stream,
        "stream": nullcontext,
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    return found
