"""Constraints in TorchRec's form: each field is honoured, or refused by its name."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.types import ShardingType

from dlrm_sharded.drop_in.fixed_tables import FixedTable
from dlrm_sharded.drop_in.module_tables import (
    PLANNED_TYPES,
    ROW_TYPES,
    WHOLE_TYPES,
    ModuleTables,
    layouts_of_types,
)
from dlrm_sharded.files.errors import ConfigError
from dlrm_sharded.plans.tables import COLUMN_MULTIPLE, Table
from dlrm_sharded.plans.task import Topology

Means = Mapping[str, float | Sequence[float]]
"""Mean ids of a sample by table: of all its features together, or a list with one for each."""

REFUSED = {
    "cache_params": "all tables are in the ranks' memory here",
    "key_value_params": "tables in key-value stores are not planned",
    "use_virtual_table": "virtual tables are not planned",
}
"""Fields that have no counterpart here, and why."""

PASSED_ON = ("enforce_hbm", "stochastic_rounding", "bounds_check_mode", "output_dtype")
"""Fields that TorchRec's planner hands on to the lookups as they are, and so does this one."""

REPLICAS, DENSE = ShardingType.DATA_PARALLEL.value, EmbeddingComputeKernel.DENSE.value
FUSED = EmbeddingComputeKernel.FUSED.value


@dataclass(frozen=True, slots=True)
class ConstrainedTables:
    """The tables of a model as their constraints and means say.

    Args:
        fixed: tables that must not lie whole on a rank, by their name.
        min_columns: smallest width of a table's column shards, by its name.
        replicable: tables that could be replicas, whether they may be or not.
    """

    modules: list[ModuleTables]
    fixed: dict[str, FixedTable]
    min_columns: dict[str, int]
    replicable: set[str]


def constrained(
    modules: Sequence[ModuleTables],
    topology: Topology,
    local_batch_size: float,
    *,
    means: Means,
    constraints: Mapping[str, ParameterConstraints],
) -> ConstrainedTables:
    """Return the tables with the layouts and the accesses that constraints leave and state.

    Args:
        means: pooling factors, which go before those of the constraints.

    Raises:
        ConfigError: a name is no table's, or a table cannot be planned as it is constrained.
    """
    names = {name for found in modules for name in found.tables}
    for argument, given in (("pooling_factors", means), ("constraints", constraints)):
        if unknown := sorted(set(given) - names):
            raise ConfigError(f"{argument} names {unknown}, which the model lacks")
    planned: list[ModuleTables] = []
    fixed: dict[str, FixedTable] = {}
    min_columns: dict[str, int] = {}
    replicable: set[str] = set()
    for found in modules:
        tables, allowed, asks_for_rows = {}, {}, ""
        for name, table in found.tables.items():
            where = f"table {table.name!r} of {found.title}"
            own = constraints.get(name)
            stated = means.get(name)
            if own is not None:
                _check(own, where, found, name, topology)
                table = _with_lookups(table, own, where, local_batch_size, stated is not None)
                min_columns |= _min_columns(own, table)
            if stated is not None:
                total = _total(
                    stated, found.tables[name].num_features, f"pooling_factors of {where}"
                )
                table = dataclasses.replace(table, pooling_factor=total)
            types = found.sharding_types if own is None else _allowed(own, where, found)
            layouts = table.layouts & layouts_of_types(types, topology)
            if "replicas" in layouts:
                replicable.add(table.name)
            if types != {REPLICAS}:
                layouts -= {"replicas"}
            if types.isdisjoint(WHOLE_TYPES):
                if found.averages_all and types & ROW_TYPES and not layouts & {"rows", "host_rows"}:
                    asks_for_rows = table.name
                else:
                    because = "its constraints allow" if types != found.sharding_types else ""
                    fixed[table.name] = _fixed(table, layouts, types, found, because)
            tables[name] = dataclasses.replace(table, layouts=layouts)
            allowed[table.name] = types
        found = dataclasses.replace(found, tables=tables, allowed=allowed)
        if asks_for_rows:
            because = f"its module pools by the mean, and {asks_for_rows!r} has to be in row blocks"
            found, in_rows = in_row_blocks(found, topology, because)
            fixed |= in_rows
        planned.append(found)
    return ConstrainedTables(planned, fixed, min_columns, replicable)


def in_row_blocks(
    found: ModuleTables, topology: Topology, because: str
) -> tuple[ModuleTables, dict[str, FixedTable]]:
    """Put all tables of a module into row blocks; return the module and these tables.

    If all of them pool by the mean, TorchRec trains row blocks of one only beside those of all.

    Args:
        because: the reason, for a message.

    Raises:
        ConfigError: the constraints of a table allow no row blocks.
    """
    tables, allowed, fixed = {}, {}, {}
    for key, table in found.tables.items():
        types = found.allowed[table.name]
        if not types & ROW_TYPES:
            named = f"table {table.name!r} of {found.title}"
            raise ConfigError(
                f"{named} may only be {', '.join(sorted(types))}, and {because}; allow "
                "row_wise for it too, or give it a module of its own"
            )
        allowed[table.name] = types & ROW_TYPES
        layouts = layouts_of_types(allowed[table.name], topology)
        tables[key] = dataclasses.replace(table, layouts=layouts)
        possible = tuple(sorted(layouts, reverse=True))  # on all ranks first
        fixed[table.name] = FixedTable(possible, because, found.title)
    return dataclasses.replace(found, tables=tables, allowed=allowed), fixed


def passed_on(own: ParameterConstraints | None) -> dict[str, Any]:
    """Return the fields of TorchRec's `ParameterSharding` that a table's constraints state."""
    values = {key: getattr(own, key, None) for key in PASSED_ON}
    return {key: value for key, value in values.items() if value is not None}


def _check(
    own: ParameterConstraints, where: str, found: ModuleTables, name: str, topology: Topology
) -> None:
    """Refuse constraints that contradict the model or the ranks, or that nothing here can keep."""
    for key, why in REFUSED.items():
        if getattr(own, key, None):
            raise ConfigError(f"the constraints of {where} have {key}, and {why}; leave it out")
    if own.device_group not in (None, topology.compute_device):
        raise ConfigError(
            f"the constraints of {where} have device_group={own.device_group!r}, and the ranks "
            f"compute on {topology.compute_device}; plan such tables by another planner"
        )
    features = found.features.get(name)
    if own.feature_names is not None and features not in (None, tuple(own.feature_names)):
        raise ConfigError(
            f"the constraints of {where} have feature_names={list(own.feature_names)}, and its "
            f"features are {list(features or ())}"
        )
    if own.is_weighted and found.is_weighted is False:
        raise ConfigError(
            f"the constraints of {where} have is_weighted=True, and the module is not weighted"
        )


def _allowed(own: ParameterConstraints, where: str, found: ModuleTables) -> frozenset[str]:
    """Return the types under which a table may be trained, by its module and its constraints."""
    types = found.sharding_types & PLANNED_TYPES
    if own.sharding_types is not None:
        types &= frozenset(own.sharding_types)
    if not types:
        raise ConfigError(
            f"the constraints of {where} have sharding_types={list(own.sharding_types or ())}; "
            f"planned can be {', '.join(sorted(found.sharding_types & PLANNED_TYPES))}"
        )
    if own.compute_kernels is None:
        return types
    kernels = {REPLICAS: DENSE}
    left = frozenset(t for t in types if kernels.get(t, FUSED) in own.compute_kernels)
    if not left:
        raise ConfigError(
            f"the constraints of {where} have compute_kernels={list(own.compute_kernels)}, and "
            f"tables that are {' or '.join(sorted(types))} have the kernel "
            f"{' or '.join(sorted({kernels.get(t, FUSED) for t in types}))} here"
        )
    return left


def _fixed(
    table: Table, layouts: frozenset[str], types: frozenset[str], found: ModuleTables, because: str
) -> FixedTable:
    """Return the layouts of a table that has to lie in row blocks or replicas."""
    because = f"{because or 'its TorchRec sharder trains it'} only {', '.join(sorted(types))}"
    possible = tuple(name for name in ("rows", "host_rows", "replicas") if name in layouts)
    if not possible:
        left = found.why_no_row_blocks if types & ROW_TYPES else None
        left = left or f"the module trains it only {', '.join(('whole', *sorted(table.layouts)))}"
        raise ConfigError(
            f"table {table.name!r} of {found.title} has no layout left: {because}, and "
            f"{_why_not_replicated(table) if types == {REPLICAS} else left}"
        )
    return FixedTable(possible, because, found.title)


def _why_not_replicated(table: Table) -> str:
    if not table.pooled:
        return "sequences have no replicas here: leave it whole or in row blocks"
    return f"replicas are in fp32, while it is in {table.precision}: change its data_type"


def _with_lookups(
    table: Table, own: ParameterConstraints, where: str, local_batch_size: float, is_known: bool
) -> Table:
    """Return a table with the lookups that its constraints state.

    TorchRec counts ids as the sum over features of batch size, poolings and pooling factor.

    Args:
        is_known: whether the pooling factor is stated elsewhere.
    """
    lengths = [float(length) for length in own.pooling_factors]
    stated = [own.num_poolings, own.batch_sizes, None if lengths == [1.0] else lengths]
    sizes = {len(values) for values in stated if values}
    if not sizes:
        return table
    if sizes - {table.num_features} and sizes != {1}:
        raise ConfigError(
            f"the constraints of {where} have pooling_factors, num_poolings or batch_sizes of "
            f"{' and '.join(map(str, sorted(sizes)))} features; the table has {table.num_features}"
        )
    (count,) = sizes
    poolings = list(own.num_poolings or [1.0] * count)
    batches = [size / local_batch_size for size in own.batch_sizes or [local_batch_size] * count]
    vectors = [p * b for p, b in zip(poolings, batches, strict=True)]
    if not is_known:
        lengths = lengths if len(lengths) == count else lengths * count
        total = sum(length * each for length, each in zip(lengths, vectors, strict=True))
        table = dataclasses.replace(table, pooling_factor=total)
    if own.num_poolings or own.batch_sizes:
        num_features = max(1, math.ceil(sum(vectors) - 1e-6))
        table = dataclasses.replace(table, num_features=num_features)
    return table


def _total(mean: float | Sequence[float], num_features: int, where: str) -> float:
    if not isinstance(mean, Sequence):
        return mean
    if len(mean) not in (1, num_features):
        raise ConfigError(
            f"pooling_factors of {where} are {len(mean)} numbers; the table has {num_features} "
            "features"
        )
    return float(sum(mean))


def _min_columns(own: ParameterConstraints, table: Table) -> dict[str, int]:
    least = own.min_partition or 0
    return {table.name: least} if least > COLUMN_MULTIPLE else {}
