"""Profiles a few training steps with torch.profiler, and writes a Chrome trace for each rank.

TorchRec names the phases of a step, such as `## backward ##`. The stages of the embeddings get the
names of the measured stages here, by hooks that exist only while steps are profiled.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.profiler import profile, record_function, schedule
from torchrec.distributed.types import Awaitable

from dlrm_sharded.model.sharded_model import sharded_embeddings
from dlrm_sharded.plans.plan_cost import BWD_COMM, BWD_COMPUTE, FWD_COMM, FWD_COMPUTE, INPUT_DIST
from dlrm_sharded.ranks.distributed import Rank
from dlrm_sharded.training.trainer_config import TrainerConfig

log = logging.getLogger(__name__)

TRACE_FOLDER = "trace"


def make_profiler(
    model: nn.Module,
    config: TrainerConfig,
    rank: Rank,
    folder: Path,
    *,
    start_step: int,
    num_steps: int,
) -> StepProfiler | None:
    """Return a profiler of the steps after the warm-up; None if no such step is left.

    Args:
        folder: folder of the traces of all ranks.
        start_step: number of steps trained before this process.
        num_steps: number of steps of the whole run.
    """
    num_warmup = config.warmup_steps(rank.device)
    first = start_step + num_warmup + 1
    last = first + config.trace_steps
    if last > num_steps and rank.is_zero:
        log.warning(
            "trainer.trace: only %d of %d steps are traced: the training ends at step %d, "
            "and tracing begins after %d warm-up steps and one for the profiler; set "
            "trainer.num_steps to at least %d",
            max(0, num_steps - first),
            config.trace_steps,
            num_steps,
            num_warmup,
            last,
        )
    steps = range(first, min(last, num_steps) + 1)
    return StepProfiler(model, steps, rank, folder) if len(steps) > 1 else None


class StepProfiler(AbstractContextManager["StepProfiler"]):
    """Profiles steps of this rank.

    Args:
        steps: numbers of the steps, counted from 1. The first one is not in the trace, because
            the profiler starts in it.
        folder: folder of the traces of all ranks.
    """

    def __init__(self, model: nn.Module, steps: range, rank: Rank, folder: Path) -> None:
        self.steps = steps
        self._model = model
        self._rank = rank
        self._folder = folder
        self._running = ExitStack()

    def __exit__(self, *error: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start the profiler before its first step, and remove older traces of the run."""
        if self._rank.is_zero:
            for old in self._folder.glob("rank*.json.gz"):
                old.unlink()
        self._profile = profile(
            schedule=schedule(wait=0, warmup=1, active=len(self.steps) - 1, repeat=1),
            on_trace_ready=self._write,
        )
        name_stages(self._model, self._running)
        self._running.enter_context(self._profile)

    def step(self) -> None:
        """Tell the profiler that the next step begins."""
        self._profile.step()

    def stop(self) -> None:
        """Write the trace after the last profiled step; later calls do nothing."""
        self._running.close()

    def _write(self, profiled: profile) -> None:
        path = self._folder / f"rank{self._rank.rank}.json.gz"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            profiled.export_chrome_trace(str(path))
        except OSError as error:
            log.warning("the trace is lost: %s cannot be written: %s", path, error.strerror)
            return
        if self._rank.is_zero:
            log.info(
                "steps %d to %d are traced in %s, which ui.perfetto.dev shows",
                self.steps[1],
                self.steps[-1],
                path,
            )


def name_stages(model: nn.Module, hooks: ExitStack) -> None:
    """Let a profiler see the stages of the embeddings, and the redistribution of ids, by name.

    Args:
        hooks: removes the hooks when it closes.
    """
    embeddings: Any = sharded_embeddings(model)
    for modules, stage, after in (
        (embeddings._input_dists, INPUT_DIST, None),
        (embeddings._lookups, FWD_COMPUTE, _name_lookups_backward),
        (embeddings._output_dists, FWD_COMM, _name_exchange),
    ):
        for module in modules:
            for handle in _name_calls(module, stage):
                hooks.callback(handle.remove)
            if after is not None:
                hooks.callback(module.register_forward_hook(after).remove)


def _name_calls(module: nn.Module, name: str) -> Iterator[Any]:
    calls: list[record_function] = []

    def enter(module: nn.Module, inputs: Any) -> None:
        calls.append(record_function(name))
        calls[-1].__enter__()

    def leave(module: nn.Module, inputs: Any, output: Any) -> None:
        if calls:
            calls.pop().__exit__(None, None, None)

    yield module.register_forward_pre_hook(enter, prepend=True)
    yield module.register_forward_hook(leave, always_call=True)


def _name_lookups_backward(module: nn.Module, inputs: Any, vectors: Tensor) -> None:
    _name_backward(vectors, BWD_COMPUTE)


def _name_exchange(module: nn.Module, inputs: Any, exchange: Awaitable[Tensor]) -> _NamedWait:
    return _NamedWait(exchange, inputs[0].grad_fn)


class _NamedWait(Awaitable[Tensor]):
    """The wait for exchanged vectors, and the exchange of their gradients, as named stages.

    Args:
        looked_up: autograd's node of the vectors before the exchange.
    """

    def __init__(self, exchange: Awaitable[Tensor], looked_up: Node | None) -> None:
        super().__init__()
        self._exchange = exchange
        self._looked_up = looked_up

    def _wait_impl(self) -> Tensor:
        with record_function(FWD_COMM):
            vectors = self._exchange.wait()
        _name_backward(vectors, BWD_COMM, until=self._looked_up)
        return vectors


def _name_backward(result: Tensor, name: str, *, until: Node | None = None) -> None:
    """Name the backward pass from a result to its inputs, or to autograd's node `until`."""
    seen = {until}
    nodes = [result.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen or hasattr(node, "variable"):  # DDP hooks weights' nodes
            continue
        seen.add(node)
        enter, leave = _region_hooks(name)
        node.register_prehook(enter)
        node.register_hook(leave)
        nodes += [inner for inner, _ in node.next_functions]


def _region_hooks(name: str) -> tuple[Callable[..., None], Callable[..., None]]:
    region = record_function(name)

    def enter(*gradients: Any) -> None:
        region.__enter__()

    def leave(*gradients: Any) -> None:
        region.__exit__(None, None, None)

    return enter, leave
