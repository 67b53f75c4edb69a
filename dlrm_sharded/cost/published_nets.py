"""The published cost models of NeuroShard (arXiv:2305.01868, sec. 3.2), for comparison.

One net reads each table, its outputs are summed over a rank's tables, and a second net maps the sum
to the rank's times. Communication has one net per world size, which reads the columns of all ranks
in rank order. Raw features are z-scored and the loss is the squared error in ms. Differs: forward
and backward computation are two outputs of the same net, one for each of our stages; ranks start
together, so there are no start-time differences to read.

The architecture lacks the guarantees of `learned`: an empty rank has a cost, a time may be
negative or fall when columns are added, a relabeling of ranks changes it, and world sizes that
were not measured have no model.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from dlrm_sharded.accesses.profiles import with_profiles
from dlrm_sharded.cost.prior import provenance_of_artifact
from dlrm_sharded.cost.trial import try_predicting
from dlrm_sharded.cost.workload import Floats, Indices, Workload, workload_of_plan
from dlrm_sharded.files.errors import ConfigError
from dlrm_sharded.hardware.artifact import Arrays, built_from, load_artifact
from dlrm_sharded.hardware.artifact_kinds import cost_model_kind, other_device_caveat
from dlrm_sharded.hardware.context import RunContext
from dlrm_sharded.plans.cost_provenance import CostProvenance
from dlrm_sharded.plans.plan import ShardingPlan
from dlrm_sharded.plans.plan_cost import BWD_COMM, BWD_COMPUTE, FWD_COMM, FWD_COMPUTE, PlanCost
from dlrm_sharded.plans.tables import NUM_REUSE_BINS
from dlrm_sharded.plans.task import ShardingTask, Topology

KIND = "neuroshard"
TABLE_FEATURES = (
    "embedding_dim",
    "num_embeddings",
    "pooling_factor",
    *(f"reuse_bin_{i}" for i in range(NUM_REUSE_BINS)),
)
PAPER_FEATURES = {"table": list(TABLE_FEATURES), "communication": ["columns_by_rank"]}
TABLE_LAYERS, RANK_LAYERS, COMMUNICATION_LAYERS = (128, 32), (64,), (128, 64)


def _mlp(sizes: Sequence[int]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for size_in, size_out in itertools.pairwise(sizes):
        layers += [nn.Linear(size_in, size_out), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class PaperNets(nn.Module):
    """Nets for a rank's computation from its tables, and for all ranks' exchanges of columns.

    Args:
        world_sizes: numbers of ranks that have a communication net.
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

    def vectors(self, features: Floats) -> Tensor:
        """Return [S, V], the outputs of the first net for `TABLE_FEATURES` of shards [S, F]."""
        scaled = (torch.tensor(features, dtype=torch.float32) - self.scale_mean) / self.scale_std
        found: Tensor = self.table(scaled)
        return found

    def compute(self, features: Floats, rank: Indices, num_ranks: int) -> Tensor:
        """Return forward and backward ms [ranks, 2] for shards [S, F] on ranks [S]."""
        vectors = self.vectors(features)
        sums = torch.zeros(num_ranks, vectors.shape[1])
        return self.rank(sums.index_add(0, torch.tensor(rank), vectors))

    def communicate(self, columns: Floats) -> Tensor:
        """Return forward and backward ms [N, W, 2] for thousands of columns by rank [N, W]."""
        net = self.communication[str(columns.shape[1])]
        return net(torch.tensor(columns, dtype=torch.float32)).view(*columns.shape, 2)


@dataclass(frozen=True, slots=True)
class NeuroShardCostModel:
    """Predicts with `PaperNets`.

    Args:
        name: name of the hardware that the nets were trained for.
        device: type of the device that computed there, "cpu" or "cuda".
        provenance: origin of the costs and their expected error.
    """

    costs_name: ClassVar[str] = "neuroshard"

    nets: PaperNets
    name: str
    device: str
    provenance: CostProvenance | None = None

    def predict(self, plan: ShardingPlan, task: ShardingTask) -> PlanCost:
        """Predict a plan; the redistribution of ids is not modeled.

        Raises:
            ConfigError: there is no net for the world size.
        """
        return self.predict_workload(workload_of_plan(plan, with_profiles(task)))

    def caveat(self, topology: Topology) -> str | None:
        """Return the caveat if the ranks compute on another type of device, else None."""
        return other_device_caveat(self.name, self.device, topology.compute_device)

    def check_world_size(self, size: int) -> None:
        """Raise ConfigError if there is no net for the exchanges of this many ranks."""
        if str(size) not in self.nets.communication and size > 1:
            known = ", ".join(self.nets.communication)
            raise ConfigError(
                f"cost_model=neuroshard has a communication net for each of {known} ranks, "
                f"none for {size}; use the costs of cost_model=learned"
            )

    def costs_of(self, task: ShardingTask) -> NetCosts:
        """Return the costs of a task's shards and ranks; ConfigError as for `predict`."""
        self.check_world_size(task.topology.world_size)
        return NetCosts(self, with_profiles(task))

    def predict_workload(self, workload: Workload) -> PlanCost:
        size = workload.world_size
        self.check_world_size(size)
        with torch.no_grad():
            compute = self.nets.compute(table_features(workload), workload.rank, size)
            comm = torch.zeros(size, 2)
            if size > 1:
                comm = self.nets.communicate(columns_by_rank(workload)[None])[0]
        return PlanCost.from_stages(
            {
                FWD_COMPUTE: compute[:, 0].tolist(),
                FWD_COMM: comm[:, 0].tolist(),
                BWD_COMM: comm[:, 1].tolist(),
                BWD_COMPUTE: compute[:, 1].tolist(),
            },
            input_dist_ms=None,
        )


@dataclass(frozen=True, slots=True)
class NetCosts:
    """Costs of a task's shards and ranks, by which the published search places tables.

    Letters: S shards, K ranks of any plans, N plans, W ranks, V size of a table's vector.

    Args:
        task: its tables all have access profiles.
    """

    model: NeuroShardCostModel
    task: ShardingTask

    def vectors(self, table: Indices, num_cols: Indices) -> Floats:
        """Return [S, V], the output of the first net for some columns of tables, each [S]."""
        tables = [self.task.tables[i] for i in table]
        features = np.column_stack(
            [
                num_cols,
                [each.num_embeddings for each in tables],
                [each.pooling_factor for each in tables],
                np.array([each.reuse_histogram for each in tables]),
            ]
        )
        with torch.no_grad():
            return self.model.nets.vectors(features).double().numpy()

    def compute_ms(self, sums: Floats) -> Floats:
        """Return [K], computation in both directions of ranks with sums of vectors [K, V]."""
        with torch.no_grad():
            times: Tensor = self.model.nets.rank(torch.tensor(sums, dtype=torch.float32))
        return times.double().sum(dim=1).numpy()

    def exchanges_ms(self, num_cols: Floats, num_shards: Floats) -> Iterator[Floats]:
        """Yield [N, W], all exchanges of ranks with columns [N, W]; none on one rank."""
        if num_cols.shape[1] > 1:
            with torch.no_grad():
                yield self.model.nets.communicate(num_cols / 1e3).double().sum(dim=2).numpy()


def neuroshard_cost_model(context: RunContext, artifact: str | None = None) -> NeuroShardCostModel:
    """Load the nets of some hardware, as `learned_cost_model` finds them."""
    kind = cost_model_kind(KIND)
    loaded = load_artifact(artifact, kind, PAPER_FEATURES, context)
    with built_from(loaded, kind):
        nets = from_arrays(loaded.arrays)
        model = NeuroShardCostModel(
            nets,
            name=loaded.meta["hardware"],
            device=loaded.meta["device"],
            provenance=provenance_of_artifact(loaded),
        )
        try_predicting(model.predict_workload, [1, *map(int, nets.communication)])
        return model


def table_features(workload: Workload) -> Floats:
    """Return [S, features], in the order of `TABLE_FEATURES`."""
    pooling_factor = workload.num_ids / workload.batch_size
    return np.column_stack(
        [workload.num_cols, workload.num_rows, pooling_factor, workload.reuse_histogram]
    )


def columns_by_rank(workload: Workload) -> Floats:
    """Return [W], columns of each rank, in thousands."""
    return workload.by_rank(workload.num_cols) / 1e3


def to_arrays(nets: PaperNets) -> Arrays:
    """Return the arrays for an artifact's file."""
    return {key: value.numpy() for key, value in nets.state_dict().items()}


def from_arrays(arrays: Arrays) -> PaperNets:
    """Build the nets from the arrays of `to_arrays`."""
    sizes = sorted({int(key.split(".")[1]) for key in arrays if key.startswith("communication.")})
    nets = PaperNets(sizes)
    state: dict[str, Any] = {key: torch.from_numpy(value) for key, value in arrays.items()}
    nets.load_state_dict(state)
    return nets
