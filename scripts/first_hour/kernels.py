"""FBGEMM's lookups and fused optimizers against their definitions in fp64, on the CPU.

The tables pass through the code that training uses: `fuse`, TorchRec's sharder and our plan.
Letters: R rows, D columns, B samples.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec.distributed.embeddingbag import (
    EmbeddingBagCollectionSharder,
    ShardedEmbeddingBagCollection,
)
from torchrec.distributed.types import EmbeddingModuleShardingPlan
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_sharded.measuring.rank_bench import draw_ids
from dlrm_sharded.model.fused_optimizers import EMBEDDING_OPTIMIZERS, fuse
from dlrm_sharded.model.torchrec_adapter import bag_configs, parameter_sharding, sharding_env
from dlrm_sharded.plans.layouts import ColumnShards
from dlrm_sharded.plans.plan import Shard
from dlrm_sharded.plans.tables import Table, max_shard_columns
from dlrm_sharded.plans.task import GIB, Topology
from dlrm_sharded.ranks.distributed import process_group
from studies.study import StudyRun

WIDTHS = (4, 8, 12, 20, 36, 60, 100, 128, 132, 256, 516, 1024, 2048)
GROUPS = {"all widths": WIDTHS, "up to 128 columns": WIDTHS[:8], "up to 32 columns": WIDTHS[:4]}
"""Tables that share a lookup. FBGEMM chooses its kernel by the widest table among them."""

TOO_WIDE = 2052
"""Smallest width that FBGEMM refuses on CUDA."""

LEARNING_RATE = 0.1
NUM_STEPS = 2
MAX_ERROR = {"sgd": 1e-4, "rowwise_adagrad": 1e-4, "adam": 2e-2}
"""Largest error of new weights, relative to the largest change. Adam divides gradients by their
size, so that rounding decides on the few weights of millions whose gradients nearly cancel; a wrong
number of steps would be an error of 0.2."""

MAX_LOOKUP_ERROR = 1e-5
ADAM_EPS = 1e-8


def run(study: StudyRun) -> None:
    device = study.device()
    sizes = (300, 32) if study.small else (10_000, 1024)
    worst: dict[str, float] = {}
    optimizers = list(EMBEDDING_OPTIMIZERS)
    if device.type == "cpu":
        study.record("adam", "not fused on a CPU")
        optimizers.remove("adam")
    cases = {
        f"{optimizer}, {group}": functools.partial(
            _checked, study, optimizer, group, device, *sizes
        )
        for optimizer in optimizers
        for group in GROUPS
    }
    with process_group():
        for name, found in study.each(cases):
            optimizer = name.split(",")[0]
            worst[optimizer] = max(worst.get(optimizer, 0.0), *found["weight_error"].values())
        refusal = refusal_of(TOO_WIDE, device)
    study.record(f"{TOO_WIDE} columns", refusal or "accepted")
    study.check(
        (refusal is not None) == (device.type == "cuda"),
        f"{TOO_WIDE} columns on {device.type}: {refusal or 'accepted'}",
    )
    study.show(**{f"{name}": f"{error:.1e}" for name, error in worst.items()})


def _checked(
    study: StudyRun, optimizer: str, group: str, device: torch.device, *sizes: int
) -> dict[str, Any]:
    """Return the errors of an optimizer for a group of tables, and check that they are small."""
    widths = [width for width in GROUPS[group] if width <= max_shard_columns(device.type)]
    found = compare(optimizer, widths, device, *sizes)
    most = {"lookup_error": MAX_LOOKUP_ERROR, "weight_error": MAX_ERROR[optimizer]}
    for key, most_error in most.items():
        text = f"{optimizer}, {group}: each relative {key.replace('_', ' ')} is {found[key]}"
        study.check(max(found[key].values()) <= most_error, text)
    changed = found["changed_by_zeros"]
    study.check(not changed, f"{optimizer}, {group}: zero gradients change the tables {changed}")
    return found


def compare(
    optimizer: str, widths: Sequence[int], device: torch.device, num_rows: int, batch_size: int
) -> dict[str, Any]:
    """Return the errors of lookups and of weights after some steps, by width.

    An error is the largest difference relative to the largest number of the definition.
    """
    tables = [Table(f"d{width}", num_rows, width, 5.5) for width in widths]
    module = sharded(tables, optimizer, device)
    weights = weights_of(module)
    rng = torch.Generator().manual_seed(0)
    for weight in weights.values():
        weight.copy_(torch.randn(weight.shape, generator=rng))
    start = {name: weight.detach().cpu().clone() for name, weight in weights.items()}
    definitions = {name: Definition(optimizer, weight.double()) for name, weight in start.items()}
    changed_by_zeros: list[str] = []
    lookup_error: dict[str, float] = {}
    drawn = draw_ids(tables, batch_size=batch_size, num_batches=1 + NUM_STEPS, seed=0)
    for number, batch in enumerate(drawn.batches):
        ids = KeyedJaggedTensor(
            keys=[table.name for table in tables],
            values=torch.cat([torch.from_numpy(batch[table.name].values) for table in tables]),
            lengths=torch.cat([torch.from_numpy(batch[table.name].lengths) for table in tables]),
        )
        pooled = module(ids.to(device)).to_dict()
        gradients = {
            # the first step is of zero gradients, which must leave the tables as they are
            name: torch.randn(vectors.shape, generator=rng) * (number > 0)
            for name, vectors in pooled.items()
        }
        torch.autograd.backward(
            list(pooled.values()), [gradients[name].to(device) for name in pooled]
        )
        for name, definition in definitions.items():
            expected = definition.step(ids[name].values(), ids[name].lengths(), gradients[name])
            error = relative_error(pooled[name].detach(), expected, scale=expected)
            lookup_error[name] = max(lookup_error.get(name, 0.0), error)
            if number == 0 and not torch.equal(weights[name].cpu(), start[name]):
                changed_by_zeros.append(name)
    weight_error = {
        name: relative_error(
            weights[name], definition.weight, scale=definition.weight - start[name].double()
        )
        for name, definition in definitions.items()
    }
    return {
        "lookup_error": lookup_error,
        "weight_error": weight_error,
        "changed_by_zeros": changed_by_zeros,
    }


def refusal_of(width: int, device: torch.device) -> str | None:
    """Return the error of a lookup in a table of this width; None if there is none."""
    table = Table("wide", 16, width, 1.0)
    module = sharded([table], "sgd", device)
    ids = KeyedJaggedTensor(
        ["wide"], torch.zeros(2, dtype=torch.int32), lengths=torch.ones(2).int()
    )
    try:
        module(ids.to(device)).to_dict()["wide"].sum().item()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return None


def sharded(
    tables: Sequence[Table], optimizer: str, device: torch.device
) -> ShardedEmbeddingBagCollection:
    """Return the tables on this rank, whole."""
    topology = Topology(1, memory_bytes=GIB, compute_device=device.type)
    unsharded = EmbeddingBagCollection(tables=bag_configs(tables), device=torch.device("meta"))
    fuse(optimizer, unsharded.parameters(), LEARNING_RATE)
    plan = EmbeddingModuleShardingPlan(
        {
            table.name: parameter_sharding([Shard.whole(table, rank=0)], ColumnShards(), topology)
            for table in tables
        }
    )
    module: ShardedEmbeddingBagCollection = EmbeddingBagCollectionSharder().shard(
        unsharded, plan, sharding_env(dist.group.WORLD), device
    )
    return module


def weights_of(module: ShardedEmbeddingBagCollection) -> dict[str, Tensor]:
    """Return the weights [R, D] of the tables; to change them is to change the tables."""
    weights = {}
    for name, weight in module.state_dict().items():
        assert isinstance(weight, ShardedTensor)
        weights[name.split(".")[-2]] = weight.local_shards()[0].tensor
    return weights


def relative_error(found: Tensor, expected: Tensor, *, scale: Tensor) -> float:
    return float((found.cpu().double() - expected).abs().max() / scale.abs().max())


class Definition:
    """A table in fp64 and its optimizer, by torch and TorchRec.

    Args:
        weight: [R, D].
    """

    def __init__(self, optimizer: str, weight: Tensor) -> None:
        self._table = torch.nn.EmbeddingBag.from_pretrained(
            weight, freeze=False, mode="sum", sparse=optimizer == "adam"
        )
        self._optimizer = UPDATES[optimizer](self._table.parameters(), lr=LEARNING_RATE)

    @property
    def weight(self) -> Tensor:
        return self._table.weight.detach()

    def step(self, ids: Tensor, lengths: Tensor, gradient: Tensor) -> Tensor:
        """Return the pooled vectors [B, D], and update the table with their gradient [B, D].

        Args:
            ids: [sum of lengths].
            lengths: [B].
        """
        pooled: Tensor = self._table(ids.long(), (lengths.cumsum(0) - lengths).long())
        self._optimizer.zero_grad()
        pooled.backward(gradient.double())
        self._optimizer.step()
        return pooled.detach()


class Adam(torch.optim.SparseAdam):
    """Adam that updates only the rows that a batch uses, as FBGEMM does.

    torch's adds eps to the root of the second moment before correcting its bias, so that after few
    steps eps counts about 30 times as much as in Adam's definition (Kingma and Ba, algorithm 1).
    """

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            [parameter] = group["params"]
            num_steps = self.state[parameter].get("step", 0) + 1
            group["eps"] = ADAM_EPS * math.sqrt(1 - group["betas"][1] ** num_steps)
        return super().step(closure)


UPDATES: Mapping[str, Any] = {
    "sgd": torch.optim.SGD,
    "rowwise_adagrad": RowWiseAdagrad,
    "adam": Adam,
}
