"""Names the collective that a rank waited in, from the traceback of the error that ended it."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from types import FrameType

EMBEDDING_COLLECTIVES = {
    # Beginnings of class names in TorchRec's comm_ops.py and dist_data.py; the first one counts.
    "All2All_Seq": "the all-to-all of embeddings",
    "All2All": "the all-to-all of pooled embeddings",
    "Variable_Batch_All2All": "the all-to-all of pooled embeddings",
    "ReduceScatter": "the reduce-scatter of pooled embeddings",
    "AllGather": "the all-gather of embeddings",
    "KJTAllToAllTensors": "the all-to-all of ids",
    "KJTAllToAllSplits": "the all-to-all of the numbers of ids",
    "SplitsAllToAll": "the all-to-all of the numbers of ids",
    "PooledEmbeddings": "the exchange of pooled embeddings",
    "SequenceEmbeddings": "the exchange of embeddings",
}
GRADIENTS = "the gradient all-reduce"
LIBRARIES = ("/torch/", "/torchrec/", "/contextlib.py")


def collective_name(error: BaseException) -> str:
    """Return words for the collective in which an error was raised."""
    frames = [
        (frame.f_code.co_filename, frame.f_code.co_qualname)
        for frame, _ in traceback.walk_tb(error.__traceback__)
    ]
    return name_of_frames(frames) or "a collective"


def frames_of(frame: FrameType | None) -> list[tuple[str, str]]:
    """Return file and qualified function name of a frame and its callers, the innermost last."""
    frames = [(f.f_code.co_filename, f.f_code.co_qualname) for f, _ in traceback.walk_stack(frame)]
    return frames[::-1]


def name_of_frames(frames: Sequence[tuple[str, str]]) -> str | None:
    """Return words for the collective of a call, or None if it is in no known one.

    Args:
        frames: file and qualified function name of each frame, the innermost last.
    """
    for file, function in reversed(frames):
        if file.endswith(("torchrec/distributed/comm_ops.py", "torchrec/distributed/dist_data.py")):
            for beginning, words in EMBEDDING_COLLECTIVES.items():
                if function.startswith(beginning):
                    return f"{words} in the backward pass" if "backward" in function else words
    for i, (file, function) in reversed(list(enumerate(frames))):
        if file.endswith("torch/distributed/distributed_c10d.py"):
            called = _public_function(frames[i:], frames[:i])
            return f"{called} in {_caller(frames[:i])}" if called else function
        if file.endswith(("torch/nn/parallel/distributed.py", "torch/autograd/graph.py")):
            return GRADIENTS
    return None


def _public_function(inner: Sequence[tuple[str, str]], outer: Sequence[tuple[str, str]]) -> str:
    """Return the outermost collective of torch's module that the innermost frames are part of."""
    calls = [*outer, inner[0]]
    name = ""
    for file, function in reversed(calls):
        if file.endswith("torch/distributed/c10d_logger.py"):  # it wraps every collective
            continue
        if not file.endswith("torch/distributed/distributed_c10d.py"):
            break
        if not function.startswith("_"):
            name = function
    return name


def _caller(frames: Sequence[tuple[str, str]]) -> str:
    for file, function in reversed(frames):
        if not any(library in file for library in LIBRARIES):
            return function.rpartition(".")[2]
    return "torch"
