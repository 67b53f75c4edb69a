"""NeuroShard's own cost models (arXiv:2305.01868, sec. 3.2), for comparison.

A net per table, summed over a rank's tables, then a net to the rank's time; for communication a
net per world size that reads the columns of all ranks in rank order. Raw features are z-scored and
the loss is the squared time. Differs: forward and backward computation are two outputs of the same
net, as our stages are; ranks start together, so there are no start-time differences to read.

What follows from the architecture, and `learned` does not share: an empty rank costs something, a
time may be negative, nothing makes it grow with columns, a relabelling of ranks changes it, and
world sizes that were not measured have no model.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dlrm_sharded.artifact import Arrays, cost_model_kind, load_artifact
from dlrm_sharded.cost.features import Floats, Workload, workload_of_plan, workload_of_sample
from dlrm_sharded.cost.learned import with_profiles
from dlrm_sharded.cost.samples import Sample
from dlrm_sharded.cost.types import PlanCost, StageCost
from dlrm_sharded.errors import ConfigError
from dlrm_sharded.plan import ShardingPlan
from dlrm_sharded.tables import NUM_REUSE_BINS
from dlrm_sharded.task import ShardingTask

KIND = "neuroshard_paper"
TABLE_FEATURES = (
    "embedding_dim",
    "num_embeddings",
    "pooling_factor",
    *(f"reuse_bin_{i}" for i in range(NUM_REUSE_BINS)),
)
FEATURES = {"table": list(TABLE_FEATURES), "communication": ["columns_by_rank"]}
TABLE_LAYERS, RANK_LAYERS, COMMUNICATION_LAYERS = (128, 32), (64,), (128, 64)
BATCH, LEARNING_RATE = 512, 1e-3


def _mlp(sizes: Sequence[int]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for size_in, size_out in itertools.pairwise(sizes):
        layers += [nn.Linear(size_in, size_out), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class PaperNets(nn.Module):
    """Computation of a rank from its tables, communication of all ranks from their columns.

    Args:
        world_sizes: those that have a communication net.
    """

    scale_mean: Tensor
    scale_std: Tensor

    def __init__(self, world_sizes: Sequence[int]) -> None:
        super().__init__()
        self.table = _mlp([len(TABLE_FEATURES), *TABLE_LAYERS])
        self.rank = _mlp([TABLE_LAYERS[-1], *RANK_LAYERS, 2])
        self.communication = nn.ModuleDict(
            {str(size): _mlp([size, *COMMUNICATION_LAYERS, 2 * size]) for size in world_sizes}
        )
        self.register_buffer("scale_mean", torch.zeros(len(TABLE_FEATURES)))
        self.register_buffer("scale_std", torch.ones(len(TABLE_FEATURES)))

    def compute(self, features: Tensor, rank: Tensor, num_ranks: int) -> Tensor:
        """[ranks, 2], forward and backward ms, of tables [S, features] on ranks [S]."""
        tables = self.table((features - self.scale_mean) / self.scale_std)
        sums = torch.zeros(num_ranks, tables.shape[1]).index_add(0, rank, tables)
        times: Tensor = self.rank(sums)
        return times

    def communicate(self, columns: Tensor) -> Tensor:
        """[N, W, 2], forward and backward ms, of thousands of columns by rank [N, W]."""
        times: Tensor = self.communication[str(columns.shape[1])](columns)
        return times.view(*columns.shape, 2)


@dataclass(frozen=True, slots=True)
class PaperCostModel:
    """The nets as a cost model."""

    nets: PaperNets

    def predict(self, plan: ShardingPlan, task: ShardingTask) -> PlanCost:
        """Raises ConfigError for a world size without a net."""
        return self.predict_workload(workload_of_plan(plan, with_profiles(task)))

    def predict_input_dist_ms(
        self, plan: ShardingPlan, task: ShardingTask
    ) -> tuple[float, ...] | None:
        """Not modelled."""
        return None

    def predict_workload(self, workload: Workload) -> PlanCost:
        size = workload.world_size
        if str(size) not in self.nets.communication and size > 1:
            known = ", ".join(self.nets.communication)
            raise ConfigError(
                f"cost_model=neuroshard_paper has a communication net for each of {known} ranks, "
                f"none for {size}; use cost_model=learned"
            )
        with torch.no_grad():
            compute = self.nets.compute(
                torch.tensor(table_features(workload), dtype=torch.float32),
                torch.tensor(workload.rank),
                size,
            )
            comm = torch.zeros(size, 2)
            if size > 1:
                columns = torch.tensor(columns_by_rank(workload), dtype=torch.float32)
                comm = self.nets.communicate(columns[None])[0]
        stages = torch.column_stack([compute[:, 0], comm, compute[:, 1]])
        return PlanCost(tuple(StageCost(*rank) for rank in stages.tolist()))


def paper_cost_model(
    artifact: str | None = None,
    *,
    hardware: str | None = None,
    device: str,
    optimizer: str | None = None,
) -> PaperCostModel:
    """The nets of some hardware, as `learned_cost_model` finds them."""
    kind = cost_model_kind(KIND)
    found = load_artifact(
        artifact, kind, FEATURES, hardware=hardware, device=device, optimizer=optimizer
    )
    return PaperCostModel(from_arrays(found.arrays))


def table_features(workload: Workload) -> Floats:
    """[S, features]."""
    pooling_factor = workload.num_ids / workload.batch_size
    return np.column_stack(
        [workload.num_cols, workload.num_rows, pooling_factor, workload.reuse_histogram]
    )


def columns_by_rank(workload: Workload) -> Floats:
    """[W], in thousands."""
    return workload.by_rank(workload.num_cols) / 1e3


def fit_paper(samples: Sequence[Sample], *, seed: int, num_steps: int) -> PaperNets:
    """Nets trained by Adam on the squared error of mini-batches."""
    workloads = [workload_of_sample(sample) for sample in samples]
    sizes = sorted({w.world_size for w in workloads if w.world_size > 1})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        nets = PaperNets(sizes)
    generator = np.random.default_rng(seed)
    of_computation = [i for i, sample in enumerate(samples) if sample.kind == "computation"]
    all_features = np.concatenate([table_features(workloads[i]) for i in of_computation])
    nets.scale_mean.copy_(torch.tensor(all_features.mean(axis=0)))
    nets.scale_std.copy_(torch.tensor(all_features.std(axis=0) + 1e-6))
    optimizer = torch.optim.Adam(nets.parameters(), lr=LEARNING_RATE)
    ranks_per_batch = BATCH // max(workloads[i].world_size for i in of_computation)
    for _ in range(num_steps):
        optimizer.zero_grad()
        chosen = generator.choice(of_computation, min(ranks_per_batch, len(of_computation)))
        loss = _compute_loss(nets, [workloads[i] for i in chosen], [samples[i] for i in chosen])
        for size in sizes:
            of_size = [i for i, w in enumerate(workloads) if w.world_size == size]
            chosen = generator.choice(of_size, min(BATCH, len(of_size)))
            columns = np.stack([columns_by_rank(workloads[i]) for i in chosen])
            times = [
                [(rank.fwd_comm_ms, rank.bwd_comm_ms) for rank in samples[i].cost.per_rank]
                for i in chosen
            ]
            predicted = nets.communicate(torch.tensor(columns, dtype=torch.float32))
            loss = loss + nn.functional.mse_loss(predicted, torch.tensor(times))
        loss.backward()
        optimizer.step()
    return nets


def _compute_loss(
    nets: PaperNets, workloads: Sequence[Workload], samples: Sequence[Sample]
) -> Tensor:
    starts = np.cumsum([0, *(workload.world_size for workload in workloads)])
    rank = np.concatenate([w.rank + start for w, start in zip(workloads, starts, strict=False)])
    features = np.concatenate([table_features(workload) for workload in workloads])
    times = [
        (stages.fwd_compute_ms, stages.bwd_compute_ms)
        for sample in samples
        for stages in sample.cost.per_rank
    ]
    predicted = nets.compute(
        torch.tensor(features, dtype=torch.float32), torch.tensor(rank), int(starts[-1])
    )
    return nn.functional.mse_loss(predicted, torch.tensor(times))


def to_arrays(nets: PaperNets) -> Arrays:
    """What the safetensors file of an artefact holds."""
    return {key: value.numpy() for key, value in nets.state_dict().items()}


def from_arrays(arrays: Arrays) -> PaperNets:
    """The nets that `to_arrays` took apart."""
    sizes = sorted({int(key.split(".")[1]) for key in arrays if key.startswith("communication.")})
    nets = PaperNets(sizes)
    state: dict[str, Any] = {key: torch.from_numpy(value) for key, value in arrays.items()}
    nets.load_state_dict(state)
    return nets
