"""A GPU that is not there: its clock, events, streams, memory and random numbers, on a CPU.

`stand_in_gpu` replaces what torch offers of CUDA. Tensors "on the GPU" are in the host's memory and
say that they are on the device. Work that a GPU does later is done later here too: a copy with
`non_blocking` is made when the host waits for the device, and until then the target on the host has
NaNs. So a missing wait shows, as it would on a GPU, and so does one that need not be.

There are no kernels: FBGEMM's lookups and NCCL need a GPU, and `tests/gpu` has them.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tests.sleeping_gpu import Gpu as SleepingGpu
from tests.sleeping_gpu import events_of

GPU = torch.device("cuda", 0)
NAME = "NVIDIA H100 80GB HBM3"
TOTAL_BYTES, FREE_BYTES = 80 * 2**30, 50 * 2**30


class Gpu(SleepingGpu):
    """A device and a host whose times follow from the calls, with memory and random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.free_bytes, self.total_bytes = FREE_BYTES, TOTAL_BYTES
        self.peak_bytes = 0
        self.random_state = torch.arange(16, dtype=torch.uint8)
        self._later: list[Callable[[], object]] = []

    def later(self, work: Callable[[], object]) -> None:
        """Do some work when the host waits for the device."""
        self._later.append(work)

    def wait_until(self, time_ms: float) -> None:
        super().wait_until(time_ms)
        works, self._later = self._later, []
        for work in works:
            work()

    def reset_peak(self, device: Any = None) -> None:
        self.calls.append("reset_peak_memory_stats")
        self.peak_bytes = 0

    def remember(self, state: Tensor, device: Any = None) -> None:
        self.random_state = state

    def properties(self, device: Any = None) -> Any:
        return SimpleNamespace(
            name=NAME,
            uuid="11111111-aaaa-bbbb-cccc-dddddddddddd",
            major=9,
            minor=0,
            total_memory=self.total_bytes,
            memory_clock_rate=2_619_000,
            memory_bus_width=5120,
        )


class _OnHost(TorchFunctionMode):
    """Keeps tensors of the GPU in the host's memory."""

    def __init__(self, gpu: Gpu) -> None:
        super().__init__()
        self._gpu = gpu

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.device:
            return func(*args, **kwargs)
        was_there = any(map(_is_there, args))
        if func in _READ:
            return _READ[func] if was_there else func(*args)
        assert not (func is Tensor.numpy and was_there), "numpy cannot read the memory of a GPU"
        kwargs.pop("pin_memory", None)
        named = [_type_of(value) for value in (*args, kwargs.get("device"))]
        goes_there, goes_here = "cuda" in named, "cpu" in named or func is Tensor.cpu
        args = tuple(_on_host(value) for value in args)
        kwargs = {key: _on_host(value) for key, value in kwargs.items()}
        later = kwargs.get("non_blocking", False)
        if func is Tensor.copy_ and later:
            self._gpu.later(lambda: args[0].copy_(args[1]))
            return args[0]
        result = func(*args, **kwargs)
        if not isinstance(result, Tensor):
            return result
        if goes_here and was_there:
            source, result = result, result.clone()
            if later:
                result.fill_(torch.nan)
                self._gpu.later(lambda: result.copy_(source))
            else:
                self._gpu.synchronize()
            return result
        if goes_there or was_there:
            result.is_on_stand_in = True  # type: ignore[attr-defined]
        return result


_READ = {Tensor.is_cuda.__get__: True, Tensor.device.__get__: GPU}  # type: ignore[attr-defined]
"""Attributes of tensors on the GPU."""


def _is_there(value: Any) -> bool:
    """Return whether a tensor is on the GPU, or one of several."""
    if isinstance(value, list | tuple):
        return any(map(_is_there, value))
    return getattr(value, "is_on_stand_in", False)


def _type_of(value: Any) -> str | None:
    """Return the type of a device, or of one in words; None for other values."""
    if isinstance(value, torch.device):
        return value.type
    return value.partition(":")[0] if isinstance(value, str) else None


def _on_host(value: Any) -> Any:
    return torch.device("cpu") if _type_of(value) == "cuda" else value


@contextmanager
def stand_in_gpu() -> Iterator[Gpu]:
    """Let torch have a GPU, which yet is not available: whoever asks for one finds none."""
    gpu = Gpu()

    event_class = events_of(gpu)

    def record_event() -> Any:
        event = event_class()
        event.record()
        return event

    stream = SimpleNamespace(synchronize=gpu.synchronize, record_event=record_event)
    with pytest.MonkeyPatch.context() as patch:
        for name, stand_in in {
            "Event": event_class,
            "_sleep": gpu.sleep,
            "synchronize": gpu.synchronize,
            "current_stream": lambda device=None: stream,
            "set_device": lambda device: gpu.calls.append(("set_device", device)),
            "device_count": lambda: 1,
            "mem_get_info": lambda device=None: (gpu.free_bytes, gpu.total_bytes),
            "max_memory_allocated": lambda device=None: gpu.peak_bytes,
            "reset_peak_memory_stats": gpu.reset_peak,
            "empty_cache": lambda: gpu.calls.append("empty_cache"),
            "get_device_name": lambda device=None: NAME,
            "get_device_properties": gpu.properties,
            "get_rng_state": lambda device=None: gpu.random_state.clone(),
            "set_rng_state": gpu.remember,
        }.items():
            patch.setattr(torch.cuda, name, stand_in)
        patch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 5))
        with _OnHost(gpu):
            yield gpu


@pytest.fixture
def gpu() -> Iterator[Gpu]:
    with stand_in_gpu() as found:
        yield found
