"""Trains the cost nets of the NeuroShard paper (arXiv:2305.01868, sec. 3.2) on measured plans."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from dlrm_sharded.calibration.samples import COMPUTATION, Sample, workload_of_sample
from dlrm_sharded.cost.published_nets import PaperNets, columns_by_rank, table_features
from dlrm_sharded.cost.workload import Workload

RANKS_PER_BATCH, LEARNING_RATE = 512, 1e-3


def fit_paper(samples: Sequence[Sample], *, seed: int, num_steps: int) -> PaperNets:
    """Train the nets by Adam on mini-batches, with the squared error in ms^2 as the loss."""
    workloads = [workload_of_sample(sample) for sample in samples]
    sizes = sorted({w.world_size for w in workloads if w.world_size > 1})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        nets = PaperNets(sizes)
    generator = np.random.default_rng(seed)
    computation = [i for i, sample in enumerate(samples) if sample.kind == COMPUTATION]
    all_features = np.concatenate([table_features(workloads[i]) for i in computation])
    nets.scale_mean.copy_(torch.tensor(all_features.mean(axis=0)))
    nets.scale_std.copy_(torch.tensor(all_features.std(axis=0) + 1e-6))
    optimizer = torch.optim.Adam(nets.parameters(), lr=LEARNING_RATE)
    plans_per_batch = RANKS_PER_BATCH // max(workloads[i].world_size for i in computation)
    for _ in range(num_steps):
        optimizer.zero_grad()
        chosen = generator.choice(computation, min(plans_per_batch, len(computation)))
        loss = _compute_loss(nets, [workloads[i] for i in chosen], [samples[i] for i in chosen])
        for size in sizes:
            same_size = [i for i, w in enumerate(workloads) if w.world_size == size]
            chosen = generator.choice(same_size, min(RANKS_PER_BATCH, len(same_size)))
            columns = np.stack([columns_by_rank(workloads[i]) for i in chosen])
            times = [
                [(rank.fwd_comm_ms, rank.bwd_comm_ms) for rank in samples[i].cost.per_rank]
                for i in chosen
            ]
            predicted = nets.communicate(columns)
            loss = loss + nn.functional.mse_loss(predicted, torch.tensor(times))
        loss.backward()
        optimizer.step()
    return nets


def _compute_loss(
    nets: PaperNets, workloads: Sequence[Workload], samples: Sequence[Sample]
) -> Tensor:
    """Return [], the mean squared error of both directions over all ranks of the plans."""
    starts = np.cumsum([0, *(workload.world_size for workload in workloads)])
    rank = np.concatenate([w.rank + start for w, start in zip(workloads, starts, strict=False)])
    features = np.concatenate([table_features(workload) for workload in workloads])
    times = [
        (stages.fwd_compute_ms, stages.bwd_compute_ms)
        for sample in samples
        for stages in sample.cost.per_rank
    ]
    predicted = nets.compute(features, rank, int(starts[-1]))
    return nn.functional.mse_loss(predicted, torch.tensor(times))
