"""Run a function as the ranks of a gloo job, in processes of their own."""

import os
import socket
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import multiprocessing

from dlrm_sharded.ranks.distributed import Rank, process_group

LIBRARIES = [
    "torchrec.distributed.model_parallel",
    "fbgemm_gpu.split_table_batched_embeddings_ops_training",
    "torchmetrics.classification",
]
"""Modules that take seconds to load: one process loads them, of which ranks are forks."""


def run_ranks(
    fn: Callable[..., Any], world_size: int, *args: Any, local_world_size: int | None = None
) -> Any:
    """What rank 0 returned from `fn(rank, *args)`: tensors in dicts and lists, numbers, strings."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.pt"
        multiprocessing.set_forkserver_preload(LIBRARIES)
        multiprocessing.start_processes(
            _run_rank,
            args=(fn, world_size, local_world_size or world_size, port, str(result), args),
            nprocs=world_size,
            start_method="forkserver",
        )
        return torch.load(result, weights_only=True)


def _run_rank(
    rank: int,
    fn: Callable[..., Any],
    world_size: int,
    local_world_size: int,
    port: int,
    result: str,
    args: tuple[Any, ...],
) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_RANK=str(rank % local_world_size),
        LOCAL_WORLD_SIZE=str(local_world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    with process_group(timeout_s=60) as me:
        returned = fn(me, *args)
        if me.is_zero:
            torch.save(returned, result)


def gathered(rank: Rank, value: Any) -> list[Any]:
    """The value of every rank, in rank order."""
    values: list[Any] = [None] * rank.world_size
    torch.distributed.all_gather_object(values, value)
    return values
