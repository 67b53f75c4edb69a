"""The arithmetic and memory traffic of the dense part of a model, from which GPUs are priced."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Kernels:
    """Operations of some layers on one rank, in the order in which they run.

    Args:
        flop: [K], floating-point operations of each one's matrix products; 0 if it has none.
        num_bytes: [K], bytes that it reads and writes.
    """

    flop: NDArray[np.float64]
    num_bytes: NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseWork:
    """Operations of the dense part in one step on one rank, see `parts.DenseTimes`.

    Args:
        gradient_bytes: size of the gradients, and likewise of the weights.
        state_tensors: tensors of the size of the weights that the optimizer keeps.
    """

    bottom_forward: Kernels
    top_forward: Kernels
    top_backward: Kernels
    bottom_backward: Kernels
    gradient_bytes: int
    state_tensors: int = 0
