"""Lets TorchRec's pipelines for devices with streams run on a CPU, where losses are compared.

On a CPU an operation ends before the next one is called, so there is no stream to wait for.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor


class HostStream(torch.cpu.Stream):
    """A stream of a CPU, with the device that TorchRec asks it for."""

    device = torch.device("cpu")


@contextmanager
def without_streams() -> Iterator[None]:
    """Let tensors on a CPU pass over `record_stream`, which torch does not have for them."""
    record: Any = Tensor.record_stream

    def pass_over(tensor: Tensor, stream: Any) -> None:
        if tensor.device.type != "cpu":
            record(tensor, stream)

    changed: Any = Tensor
    changed.record_stream = pass_over
    try:
        yield
    finally:
        changed.record_stream = record


def on_host(pipeline: type[Any]) -> type[Any]:
    """Return a class of TorchRec's pipelines that does on a CPU what the given one does on CUDA."""

    class OnHost(pipeline):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self._data_dist_stream = HostStream()  # without one, nothing is fetched ahead
            self._stream_context = nullcontext

        def attach(self, *args: Any, **options: Any) -> None:
            with without_streams():
                super().attach(*args, **options)

        def progress(self, batches: Iterator[Any]) -> Any:
            with without_streams():
                return super().progress(batches)

    return OnHost
