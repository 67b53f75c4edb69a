"""Times the matrix products of a model's dense weights, without anything else."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dlrm_sharded.model.sharded_model import sharded_embeddings
from dlrm_sharded.ranks.stopwatch import Stopwatch

REPEATS = 3


def products_ms(
    model: nn.Module, *, local_batch_size: int, device: torch.device
) -> tuple[float, float]:
    """Return the times of all products of weights in a forward and in a backward pass, in ms.

    Every matrix is multiplied once for each sample, as in linear layers. The fastest repeat counts.
    """
    in_tables = {id(weight) for weight in sharded_embeddings(model).parameters()}
    weights = [w for w in model.parameters() if id(w) not in in_tables and w.dim() == 2]
    times = [_product_ms(weight.detach(), local_batch_size, device) for weight in weights]
    return sum(forward for forward, _ in times), sum(backward for _, backward in times)


def _product_ms(weight: Tensor, num_samples: int, device: torch.device) -> tuple[float, float]:
    num_outputs, num_inputs = weight.shape
    inputs = torch.ones(num_samples, num_inputs, device=device, dtype=weight.dtype)
    gradients = torch.ones(num_samples, num_outputs, device=device, dtype=weight.dtype)
    found = []
    for _ in range(REPEATS + 1):
        watch = Stopwatch(device)
        watch.mark()
        torch.mm(inputs, weight.t())
        watch.mark()
        torch.mm(gradients, weight)
        torch.mm(gradients.t(), inputs)
        watch.mark()
        found.append(watch.intervals_ms())
    return min(forward for forward, _ in found), min(backward for _, backward in found)
