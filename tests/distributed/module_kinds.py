"""Embedding modules of every kind that TorchRec has, each in a model that says what it returns.

Every table has the feature of its number, and tables of 16 columns, unless a kind says otherwise.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.modules.embedding_configs import DataType, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.modules.feature_processor_ import PositionWeightedModuleCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection
from torchrec.modules.mc_embedding_modules import (
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
)
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from tests.distributed.torchrec_modules import managed_collisions, table_configs

CPU = torch.device("cpu")
ROWS = (40, 32, 24, 20)
FEATURES = tuple(f"f{i}" for i in range(len(ROWS)))
BATCH_SIZE, MAX_IDS = 6, 5
LEARNING_RATE = 0.05
FEW_IDS = 97 * torch.arange(1, 11)
"""Ids for managed collisions: most of them are no rows, so that none is looked up as it is."""


class Model(nn.Module):
    """Embedding modules whose outputs are joined into one vector, whatever form they have."""

    def __init__(self, *modules: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList(modules)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        return torch.cat([joined(self.inputs(part, features)) for part in self.parts])

    def inputs(self, part: nn.Module, features: KeyedJaggedTensor) -> Any:
        return part(features)


class Weighted(Model):
    """The last module gets the weights of the ids, the others do not."""

    def inputs(self, part: nn.Module, features: KeyedJaggedTensor) -> Any:
        return part(features if part is self.parts[-1] else without_weights(features))


def without_weights(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    if features.variable_stride_per_key():
        return features
    return KeyedJaggedTensor(features.keys(), features.values(), lengths=features.lengths())


def joined(outputs: Any) -> Tensor:
    """All vectors of an output, one after the other, by the name of the feature."""
    if hasattr(outputs, "wait"):
        outputs = outputs.wait()
    if isinstance(outputs, tuple):  # managed collisions also return the remapped ids
        return joined(outputs[0])
    if isinstance(outputs, KeyedTensor):
        outputs = outputs.to_dict()
    if isinstance(outputs, dict):
        return torch.cat([joined(outputs[key]) for key in sorted(outputs)])
    return (outputs.values() if isinstance(outputs, JaggedTensor) else outputs).float().flatten()


@dataclass(frozen=True)
class Kind:
    """A kind of model.

    Args:
        make: makes the model.
        batches: which batches the model takes: "bags", "weighted", "variable" or "few_ids".
        compares_tables: whether the tables of the unsharded model end as those of the sharded one;
            with managed collisions they have the same rows at other places.
        tolerance: largest difference of an output or weight from the unsharded model.
        precision: of the weights, in the unsharded model and in the sharded one.
        fuse: attaches the fused optimizers; None for the rule.
        rule: optimizer of all tables and of their replicas, with its arguments.
        options: arguments of the planner that put all tables into row blocks or make replicas, by
            sharder.
    """

    make: Callable[[], Model]
    batches: str = "bags"
    compares_tables: bool = True
    tolerance: float = 2e-6
    precision: torch.dtype = torch.float32
    fuse: Callable[[dict[str, nn.Parameter]], None] | None = None
    rule: tuple[Any, dict[str, float]] = (torch.optim.SGD, {"lr": LEARNING_RATE})
    options: dict[str, dict[str, Any]] = field(default_factory=dict)


def bags(
    data_type: DataType = DataType.FP32, *, means: Sequence[int] = (), **options: Any
) -> EmbeddingBagCollection:
    configs = table_configs(ROWS, [8, 16], means=means, data_type=data_type)
    return EmbeddingBagCollection(tables=configs, device=CPU, **options)


def sequence_configs(**options: Any) -> list[EmbeddingConfig]:
    return table_configs(ROWS, [16], kind=EmbeddingConfig, name="s", **options)


def sequences(**options: Any) -> EmbeddingCollection:
    return EmbeddingCollection(tables=sequence_configs(**options), device=CPU)


def processed() -> FeatureProcessedEmbeddingBagCollection:
    processor = PositionWeightedModuleCollection(dict.fromkeys(FEATURES, MAX_IDS), device=CPU)
    for weight in processor.parameters():  # ones otherwise, with which nothing is processed
        nn.init.uniform_(weight, 0.5, 1.5)
    configs = table_configs(ROWS, [8, 16], name="p")
    weighted = EmbeddingBagCollection(tables=configs, device=CPU, is_weighted=True)
    return FeatureProcessedEmbeddingBagCollection(weighted, processor)


def shared(make: Callable[..., nn.Module], configs: Sequence[Any]) -> nn.Module:
    """Tables 0 and 1 have two features, one of which they share; table 3 shares that of table 2."""
    configs[0].feature_names = ["f0", "f3"]
    configs[1].feature_names = ["f1", "f3"]
    configs[3].feature_names = ["f2"]
    for config in configs:  # so that every table has a row for every id
        config.num_embeddings = max(ROWS)
    return make(tables=list(configs), device=CPU)


def managed(kind: str) -> nn.Module:
    """Managed collisions, over rows that all begin alike, with a row for every id."""
    if kind == "bags":
        configs = table_configs([64, 48], [16])
        bare, wrap = EmbeddingBagCollection, ManagedCollisionEmbeddingBagCollection
    else:
        configs = table_configs([64, 48], [16], kind=EmbeddingConfig)
        bare, wrap = EmbeddingCollection, ManagedCollisionEmbeddingCollection
    for config in configs:
        config.init_fn = lambda weight: nn.init.constant_(weight, 0.1)
    inner = bare(tables=configs, device=CPU)
    return wrap(inner, managed_collisions(configs, interval=1))


def own_optimizers(tables: dict[str, nn.Parameter]) -> None:
    """Every table another rule or rate."""
    choices = [
        (torch.optim.SGD, {"lr": LEARNING_RATE}),
        (RowWiseAdagrad, {"lr": LEARNING_RATE}),
        (torch.optim.Adagrad, {"lr": LEARNING_RATE}),
        (torch.optim.SGD, {"lr": LEARNING_RATE / 2}),
    ]
    for weight, (optimizer, options) in zip(tables.values(), choices, strict=True):
        apply_optimizer_in_backward(optimizer, [weight], dict(options))


def no_optimizer(tables: dict[str, nn.Parameter]) -> None:
    """For modules that have one."""


FUSED = {"optimizer_type": torch.optim.SGD, "optimizer_kwargs": {"lr": LEARNING_RATE}}

KINDS: dict[str, Kind] = {
    "bags": Kind(lambda: Model(bags())),
    "bags of which some pool by the mean": Kind(lambda: Model(bags(means=[1, 3]))),
    "bags that all pool by the mean": Kind(
        lambda: Model(bags(means=range(len(ROWS)))),
        options={
            "rows": {
                "constraints": dict.fromkeys(
                    [f"t{i}" for i in range(len(ROWS))],
                    ParameterConstraints(sharding_types=["row_wise"]),
                )
            }
        },
    ),
    "bags in fp16": Kind(
        lambda: Model(bags(DataType.FP16)), tolerance=4e-3, precision=torch.float16
    ),
    "weighted bags": Kind(lambda: Weighted(bags(is_weighted=True)), batches="weighted"),
    "feature-processed bags": Kind(lambda: Model(processed())),
    "features shared by tables, tables with several features": Kind(
        lambda: Model(
            shared(EmbeddingBagCollection, table_configs(ROWS, [8, 16])),
            shared(EmbeddingCollection, sequence_configs()),
        )
    ),
    "tables with optimizers of their own": Kind(lambda: Model(bags()), fuse=own_optimizers),
    "batches whose size differs by feature": Kind(lambda: Model(bags()), batches="variable"),
    "sequences": Kind(lambda: Model(sequences())),
    "sequences in fp16": Kind(
        lambda: Model(sequences(data_type=DataType.FP16)), tolerance=4e-3, precision=torch.float16
    ),
    "several modules": Kind(
        lambda: Weighted(bags(), sequences(), processed(), bags(is_weighted=True)),
        batches="weighted",
    ),
    "bags with managed collisions": Kind(
        lambda: Model(managed("bags")), batches="few_ids", compares_tables=False
    ),
    "sequences with managed collisions": Kind(
        lambda: Model(managed("sequences")), batches="few_ids", compares_tables=False
    ),
    "fused bags": Kind(
        lambda: Model(FusedEmbeddingBagCollection(table_configs(ROWS, [16]), device=CPU, **FUSED)),
        fuse=no_optimizer,
    ),
}
"""Kinds that train on CPUs as the unsharded model does."""


def features(batches: str, step: int, rank: int) -> KeyedJaggedTensor:
    generator = torch.Generator().manual_seed(10 * step + rank)

    def integers(most: int, *shape: int) -> Tensor:
        return torch.randint(0, most, shape, generator=generator)

    keys = list(FEATURES)
    rows = [len(FEW_IDS)] * len(keys) if batches == "few_ids" else ROWS
    if batches == "few_ids":
        keys = keys[:2]
    sizes = [BATCH_SIZE + i for i in range(len(keys))] if batches == "variable" else None
    lengths = [integers(MAX_IDS, size) for size in sizes or [BATCH_SIZE] * len(keys)]
    ids = torch.cat([integers(most, int(n.sum())) for most, n in zip(rows, lengths, strict=False)])
    if batches == "few_ids":
        ids = FEW_IDS[ids]
    options: dict[str, Any] = {}
    if batches == "weighted":
        options["weights"] = torch.rand(len(ids), generator=generator)
    if sizes is not None:  # samples of a batch look at rows of it in any order
        options["stride_per_key_per_rank"] = [[size] for size in sizes]
        order = torch.stack([integers(size, 2 * BATCH_SIZE) for size in sizes])
        options["inverse_indices"] = (keys, order)
    return KeyedJaggedTensor(keys, ids, lengths=torch.cat(lengths).int(), **options)


def every_id() -> KeyedJaggedTensor:
    """A batch of one sample with all of the few ids, after which they have rows of their own."""
    keys = list(FEATURES[:2])
    return KeyedJaggedTensor(keys, FEW_IDS.repeat(2), lengths=torch.tensor([len(FEW_IDS)] * 2))
