"""Names the collective or function that a rank is in, from its frames."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from pathlib import Path
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
PYTHON_LIBRARY = "/lib/python3"


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
    name, caller = None, "torch"
    for file, function in frames:
        if not any(library in file for library in LIBRARIES):
            name, caller = None, function.rpartition(".")[2]
        elif file.endswith("torch/distributed/distributed_c10d.py") and function[0] != "_":
            name = name or f"{function} in {caller}"
        elif file.endswith(("torch/nn/parallel/distributed.py", "torch/autograd/graph.py")):
            name = name or GRADIENTS
    return name


def function_name(frames: Sequence[tuple[str, str]]) -> str:
    """Return the innermost function that is of no library."""
    for file, function in reversed(frames):
        if not any(library in file for library in (*LIBRARIES, PYTHON_LIBRARY)):
            return f"{function} ({Path(file).name})"
    return "a library"
