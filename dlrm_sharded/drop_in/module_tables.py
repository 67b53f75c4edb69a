"""Finds the tables of a TorchRec model, and what each of its modules can train."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.types import ModuleSharder, ShardingType
from torchrec.distributed.utils import optimizer_type_to_emb_opt_type
from torchrec.modules.embedding_configs import BaseEmbeddingConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingCollectionInterface
from torchrec.modules.embedding_tower import EmbeddingTower, EmbeddingTowerCollection
from torchrec.modules.fused_embedding_modules import (
    FusedEmbeddingBagCollection,
    FusedEmbeddingCollection,
)

from dlrm_sharded.files.errors import ConfigError, InvalidPlanError
from dlrm_sharded.plans.layouts import layout_name
from dlrm_sharded.plans.plan import Shard, ShardingPlan
from dlrm_sharded.plans.precision import TABLE_BYTES
from dlrm_sharded.plans.tables import Table
from dlrm_sharded.plans.task import Topology

log = logging.getLogger(__name__)

FUSED_MODULES = (FusedEmbeddingBagCollection, FusedEmbeddingCollection)
"""TorchRec's modules that have an optimizer of their own."""

PRECISIONS = {torch.float32: "fp32", torch.float16: "fp16"}
"""Precisions of the weights of a module without configs of tables, by their type."""

OPTIMIZER_BYTES = {
    "none": (0, 0),
    "sgd": (0, 0),
    "exact_sgd": (0, 0),
    "exact_adagrad": (4, 0),
    "lars_sgd": (4, 0),
    "row_wise_adagrad": (0, 4),
    "exact_row_wise_adagrad": (0, 4),
    "partial_row_wise_adam": (4, 4),
    "partial_row_wise_lamb": (4, 4),
    "adam": (8, 0),
    "lamb": (8, 0),
}
"""State of FBGEMM's optimizers in bytes per weight and per row of a shard, by `EmbOptimType`."""

LARGEST_STATE = (8, 8)
"""The same for optimizers that are not listed."""

WHOLE_TYPES = (
    ShardingType.COLUMN_WISE.value,  # first, as it fuses with column shards
    ShardingType.TABLE_COLUMN_WISE.value,
    ShardingType.TABLE_WISE.value,
)
"""TorchRec's types that train a whole table on one rank."""

ROW_TYPES = frozenset({ShardingType.ROW_WISE.value, ShardingType.TABLE_ROW_WISE.value})
"""TorchRec's types of row blocks."""

OBEY_LAYOUTS = "use a sharder that reads `Table.layouts` (sharder=neuroshard)"


@dataclass(frozen=True, slots=True)
class ModuleTables:
    """The tables of one module that TorchRec shards.

    Args:
        title: how messages name the module.
        tables: by the name of their parameter.
        sharding_types: TorchRec's types under which the module trains.
        is_pooled: whether the module pools; if not, it looks up sequences.
        hosted: sets of tables; each set is a tower and has to be on one host.
        averaged: parameters of the tables that pool by the mean.
        summed_and_averaged: features that tables pool by the sum, and others by the mean.
    """

    path: str
    title: str
    tables: Mapping[str, Table]
    sharding_types: frozenset[str]
    is_pooled: bool
    hosted: tuple[frozenset[str], ...]
    averaged: frozenset[str]
    summed_and_averaged: frozenset[str]

    @property
    def only_in_rows(self) -> bool:
        """Return whether the module trains no tables that are whole on one rank."""
        return self.sharding_types.isdisjoint(WHOLE_TYPES)

    @property
    def has_replicas(self) -> bool:
        """Return whether the module trains replicas; TorchRec's lookup of sequences does not."""
        return self.is_pooled and ShardingType.DATA_PARALLEL.value in self.sharding_types

    def torchrec_type(self, shards: Sequence[Shard], table: Table, topology: Topology) -> str:
        """Return TorchRec's type for the shards of a table.

        Raises:
            InvalidPlanError: the module does not train them.
        """
        one_host = topology.ranks_per_host == topology.world_size
        on_one_host = len({shard.rank // topology.ranks_per_host for shard in shards}) == 1
        layout = layout_name(shards, table, topology)
        if layout == "replicas" and layout not in table.layouts:
            raise InvalidPlanError(
                f"table {table.name!r} of {self.title} is planned data_parallel, and a replica "
                "leaves the optimizer that is fused into the table; use a sharder that reads "
                "`Table.layouts`, or see ShardedPlanner(replicas=True)"
            )
        columns, host_columns, _ = WHOLE_TYPES
        rows, host_rows = ShardingType.ROW_WISE.value, ShardingType.TABLE_ROW_WISE.value
        types = {
            None: [*WHOLE_TYPES, *([rows, host_rows] if topology.world_size == 1 else [])],
            "columns": [columns, *([host_columns] if on_one_host else [])],
            "rows": [rows, *([host_rows] if one_host else [])],
            "host_rows": [host_rows],
            "replicas": [ShardingType.DATA_PARALLEL.value],
        }[layout]
        for name in types:
            if name in self.sharding_types:
                return name
        raise InvalidPlanError(
            f"table {table.name!r} of {self.title} is planned {types[0]}, and its TorchRec sharder "
            f"trains it only {', '.join(sorted(self.sharding_types))}; {OBEY_LAYOUTS}"
        )

    def check(self, plan: ShardingPlan, topology: Topology) -> None:
        """Refuse shards that the module as a whole does not train.

        Raises:
            InvalidPlanError: FBGEMM would look up sequences of different widths, TorchRec would
                take the mean of other tables than the model, a table has another precision than in
                the model, or a tower is on several hosts.
        """
        shards = plan.shards_by_table()
        self._check_means(shards, topology)
        widths: dict[int, str] = {}
        for table in self.tables.values():
            own = shards[table.name]
            if own[0].precision != table.precision:
                raise InvalidPlanError(
                    f"table {table.name!r} of {self.title} is planned in {own[0].precision}, and "
                    f"the model has it in {table.precision}; change the data_type of its config, "
                    "or the sharder's table_precision"
                )
            if self.is_pooled or layout_name(own, table, topology) not in (None, "columns"):
                continue
            widths |= {shard.num_cols: table.name for shard in own}
            if len(widths) > 1 or len({shard.rank for shard in own}) < len(own):
                raise InvalidPlanError(
                    f"the plan has shards of {' and '.join(map(str, widths))} columns for "
                    f"{self.title}, {len(own)} of them of table {table.name!r}; TorchRec looks up "
                    "sequences in shards of one width, and one shard of a table on a rank: "
                    f"{OBEY_LAYOUTS}"
                )
        for names in self.hosted:
            on_hosts = {s.rank // topology.ranks_per_host for name in names for s in shards[name]}
            if len(on_hosts) > 1:
                raise InvalidPlanError(
                    f"the tower of the tables {sorted(names)} of {self.title} is planned on the "
                    f"hosts {sorted(on_hosts)}; TorchRec's tower sharders train a tower on one "
                    "host: pin its tables to the ranks of one (sharder.pin)"
                )

    def _check_means(self, shards: Mapping[str, Sequence[Shard]], topology: Topology) -> None:
        """Refuse row blocks of tables that pool by the mean, unless TorchRec takes their mean.

        It adds row blocks up, and then divides the vectors of all tables of the module by the
        numbers of ids, except those of the features that row blocks pool by the sum.
        """
        types = {
            name: self.torchrec_type(shards[table.name], table, topology)
            for name, table in self.tables.items()
        }
        in_rows = {name for name, type_name in types.items() if type_name in ROW_TYPES}
        if not (in_rows & self.averaged):
            return
        reason = None
        if others := [name for name in types if name not in in_rows]:
            reason = f"would also divide those of table {others[0]!r}, which is not in row blocks"
        elif self.summed_and_averaged:
            reason = (
                f"would not, where feature {min(self.summed_and_averaged)!r} is looked up, as "
                "another table pools it by the sum"
            )
        if reason is not None:
            raise InvalidPlanError(
                f"table {min(in_rows & self.averaged)!r} of {self.title} pools by the mean and is "
                f"planned in row blocks, whose vectors TorchRec divides by the numbers of ids; it "
                f"{reason}: give such tables a module of their own, or {OBEY_LAYOUTS}"
            )


def find_tables(
    model: nn.Module,
    sharders: Sequence[ModuleSharder[Any]],
    topology: Topology,
    pooling_factors: Mapping[str, float],
    *,
    replicas: bool,
) -> list[ModuleTables]:
    """Return the modules of a model that the sharders can shard, with their tables.

    Raises:
        ConfigError: there is no such module, it does not train, a table has a precision that cannot
            be planned, is in two modules or twice in the model, or has a fused optimizer that its
            replicas would leave.
    """
    found: list[ModuleTables] = []
    seen: dict[int, tuple[torch.Tensor, str]] = {}
    for path, module, sharder in _shardable(model, sharders):
        title = f"module {path!r} ({type(module).__name__})" if path else type(module).__name__
        types = _trained_types(sharder, topology.compute_device)
        if not types - {ShardingType.DATA_PARALLEL.value}:
            raise ConfigError(
                f"{title} has no lookup with a fused optimizer under {type(sharder).__name__}; "
                "ShardedPlanner plans models that are trained"
            )
        is_pooled = not any(isinstance(m, EmbeddingCollectionInterface) for m in module.modules())
        layouts = _layouts(types, topology, is_pooled=is_pooled, replicas=replicas)
        if isinstance(module, nn.EmbeddingBag):  # TorchRec gives it one shard of columns only
            layouts -= {"columns"}
        tables, configured = {}, _precisions(module)
        means = _pooled_by(PoolingType.MEAN, module)
        averaged = frozenset(config.name for config in means)
        sums = _pooled_by(PoolingType.SUM, module)
        parameters = sharder.shardable_parameters(module)
        frozen = [name for name, weight in parameters.items() if not weight.requires_grad]
        if frozen and not isinstance(module, FUSED_MODULES):  # whose weights never have gradients
            log.warning(
                "%s has tables with requires_grad=False, which TorchRec's fused lookups train all "
                "the same: %s; a learning rate of 0 keeps their weights",
                title,
                ", ".join(frozen),
            )
        for name, weight in parameters.items():
            _, owner = seen.setdefault(id(weight), (weight, title))  # who is kept keeps its id
            if owner != title:
                raise ConfigError(
                    f"table {name!r} of {title} is also one of {owner}; TorchRec shards one of the "
                    "two or both, and then they train apart: register the module at one path of "
                    "the model, and call it from there in both places"
                )
            precision = configured.get(name, PRECISIONS.get(weight.dtype, str(weight.dtype)))
            if precision not in TABLE_BYTES:
                raise ConfigError(
                    f"table {name!r} of {title} has weights in {precision}; ShardedPlanner plans "
                    f"{' and '.join(TABLE_BYTES)}: change the data_type of its config"
                )
            if "replicas" in layouts and hasattr(weight, "_optimizer_classes"):
                raise ConfigError(
                    f"ShardedPlanner has replicas=True, and table {name!r} of {title} has a fused "
                    "optimizer, which a replica would leave; plan before "
                    "apply_optimizer_in_backward, and apply it only to tables that the plan shards"
                )
            own_layouts = layouts
            if precision != "fp32":  # TorchRec's dense lookup, which replicas need, has fp32 only
                own_layouts -= {"replicas"}
            if name in averaged and len(parameters) > 1 and not types.isdisjoint(WHOLE_TYPES):
                own_layouts -= {"rows", "host_rows"}  # see ModuleTables.check
            tables[name] = Table(
                name=name,
                num_embeddings=weight.shape[0],
                embedding_dim=weight.shape[1],
                pooling_factor=pooling_factors.get(name, 1.0),
                precision=precision,
                layouts=own_layouts,
            )
        found.append(
            ModuleTables(
                path=path,
                title=title,
                tables=tables,
                sharding_types=types,
                is_pooled=is_pooled,
                hosted=_towers(module),
                averaged=averaged,
                summed_and_averaged=_features(sums) & _features(means),
            )
        )
    if not found:
        raise ConfigError("the model has no embedding module that the given sharders can shard")
    names = {name for module in found for name in module.tables}
    if unknown := sorted(set(pooling_factors) - names):
        raise ConfigError(f"pooling_factors names {unknown}, which the model lacks")
    return _with_unique_names(found)


def with_optimizer_state(
    topology: Topology, model: nn.Module, sharders: Sequence[ModuleSharder[Any]]
) -> Topology:
    """Return the topology with memory for the state of the tables' fused optimizers.

    All tables count the largest state of any, and never less than the topology says.

    Raises:
        ConfigError: a table has an optimizer that TorchRec does not fuse.
    """
    per_weight, per_row = 0, 0
    for path, module, sharder in _shardable(model, sharders):
        stated = (getattr(sharder, "fused_params", None) or {}).get("optimizer")
        if isinstance(module, FUSED_MODULES):
            stated = _fused_type(module.optimizer_type(), path or type(module).__name__)
        for name, weight in sharder.shardable_parameters(module).items():
            optimizer = stated
            for fused in getattr(weight, "_optimizer_classes", ()):
                optimizer = _fused_type(fused, f"{path}.{name}" if path else name)
            if optimizer is not None:
                state = OPTIMIZER_BYTES.get(optimizer.value, LARGEST_STATE)
                per_weight, per_row = max(per_weight, state[0]), max(per_row, state[1])
    fp32 = torch.float32.itemsize
    return dataclasses.replace(
        topology,
        bytes_per_element=max(topology.bytes_per_element, fp32 + per_weight),
        optimizer_bytes_per_row=max(topology.optimizer_bytes_per_row, per_row),
    )


def _fused_type(optimizer: type[Optimizer], path: str) -> Any:
    """Return the member of FBGEMM's `EmbOptimType` for an optimizer.

    Raises:
        ConfigError: there is none; the message names the path of the module or table.
    """
    try:
        return optimizer_type_to_emb_opt_type(optimizer)
    except ValueError as error:
        raise ConfigError(
            f"{path!r} has the fused optimizer {optimizer.__name__}, which TorchRec cannot fuse; "
            "use one that it can, such as torch.optim.Adam or torchrec.optim.RowWiseAdagrad"
        ) from error


def _shardable(
    model: nn.Module, sharders: Sequence[ModuleSharder[Any]]
) -> Iterator[tuple[str, nn.Module, ModuleSharder[Any]]]:
    """Yield each path of a module that can be sharded, the module and its sharder."""
    sharder_by_type = {sharder.module_type: sharder for sharder in sharders}
    paths: list[str] = []
    for path, module in model.named_modules(remove_duplicate=False):
        # outer modules come first, and their sharders also shard the modules inside
        is_inside = any(path.startswith(f"{outer}.") or not outer for outer in paths)
        if type(module) in sharder_by_type and not is_inside:
            paths.append(path)
            yield path, module, sharder_by_type[type(module)]


def _trained_types(sharder: ModuleSharder[Any], device: str) -> frozenset[str]:
    """Return the types that a module trains, replicas with the dense lookup, others fused.

    On CPUs, all types train that TorchRec offers on GPUs, though it does not offer all of them.
    """
    return frozenset(
        name
        for name in {*sharder.sharding_types(device), *sharder.sharding_types("cuda")}
        if (
            EmbeddingComputeKernel.DENSE
            if name == ShardingType.DATA_PARALLEL.value
            else EmbeddingComputeKernel.FUSED
        ).value
        in sharder.compute_kernels(name, device)
    )


def _layouts(
    types: frozenset[str], topology: Topology, *, is_pooled: bool, replicas: bool
) -> frozenset[str]:
    """Return the layouts that sharders may choose for the tables of a module.

    Sequences have no column shards, as all of them would need the same width, and no replicas.
    """
    one_host = topology.ranks_per_host == topology.world_size
    host_rows = ShardingType.TABLE_ROW_WISE.value in types
    columns, host_columns, _ = WHOLE_TYPES
    may_be = {
        "columns": is_pooled and (columns in types or (one_host and host_columns in types)),
        "rows": ShardingType.ROW_WISE.value in types or (one_host and host_rows),
        "host_rows": host_rows,
        "replicas": replicas and is_pooled and ShardingType.DATA_PARALLEL.value in types,
    }
    return frozenset(layout for layout, is_possible in may_be.items() if is_possible)


def _precisions(module: nn.Module) -> dict[str, str]:
    """Return the precisions of the tables that have a config, as FBGEMM allocates them.

    TorchRec's unsharded modules hold everything in fp16 that is not in fp32.
    """
    return {config.name: str(config.data_type.value).lower() for config in _configs(module)}


def _pooled_by(kind: PoolingType, module: nn.Module) -> list[BaseEmbeddingConfig]:
    """Return the configs of the tables that pool by the sum or by the mean."""
    return [config for config in _configs(module) if getattr(config, "pooling", None) is kind]


def _features(configs: Sequence[BaseEmbeddingConfig]) -> frozenset[str]:
    return frozenset(name for config in configs for name in config.feature_names)


def _configs(module: nn.Module) -> Iterator[BaseEmbeddingConfig]:
    """Yield the configs of the tables of a module and those inside."""
    for inner in module.modules():
        for configs in ("embedding_bag_configs", "embedding_configs"):
            if hasattr(inner, configs):
                yield from getattr(inner, configs)()


def _towers(module: nn.Module) -> tuple[frozenset[str], ...]:
    """Return the names of the tables of each tower of a module; nothing if it has none."""
    towers = module.towers if isinstance(module, EmbeddingTowerCollection) else [module]
    return tuple(
        frozenset(name.split(".")[-2] for name, _ in tower.embedding.named_parameters())
        for tower in towers
        if isinstance(tower, EmbeddingTower)
    )


def _with_unique_names(found: Sequence[ModuleTables]) -> list[ModuleTables]:
    """Prefix names that several modules use with the path of the module."""
    names = [name for module in found for name in module.tables]

    def unique(module: ModuleTables, name: str) -> str:
        return f"{module.path}.{name}" if names.count(name) > 1 else name

    return [
        dataclasses.replace(
            module,
            tables={
                name: dataclasses.replace(table, name=unique(module, name))
                for name, table in module.tables.items()
            },
            hosted=tuple(frozenset(unique(module, n) for n in tower) for tower in module.hosted),
        )
        for module in found
    ]
