"""Constraints in TorchRec's form: each field is honored, or refused by its name."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torchrec.distributed.planner.types import ParameterConstraints

from dlrm_sharded.drop_in.fixed_tables import FixedTable
from dlrm_sharded.drop_in.module_tables import (
    MEANS_IN_ROW_BLOCKS,
    REPLICAS,
    ROW_TYPES,
    WHOLE_TYPES,
    ModuleTables,
    kernel_of,
    layouts_of_types,
    only,
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
"""Fields that this planner, like TorchRec's, passes on to the lookups unchanged."""

NONE = ParameterConstraints()
"""The constraints of a table that has none."""


@dataclass(frozen=True, slots=True)
class ConstrainedTables:
    """The tables of a model, as their constraints and pooling factors leave them.

    Args:
        fixed: tables that must not lie whole on a rank, by their name.
        min_columns: smallest width of a table's column shards, by its name.
    """

    modules: list[ModuleTables]
    fixed: dict[str, FixedTable]
    min_columns: dict[str, int]


def constrained(
    modules: Sequence[ModuleTables],
    topology: Topology,
    local_batch_size: float,
    *,
    means: Means,
    constraints: Mapping[str, ParameterConstraints],
) -> ConstrainedTables:
    """Return the tables with the layouts that constraints allow and the accesses that they state.

    Args:
        means: pooling factors, which take precedence over those of the constraints.

    Raises:
        ConfigError: a name is not a table's, or a table cannot be planned under its constraints.
    """
    names = {name for found in modules for name in found.tables}
    for argument, given in (("pooling_factors", means), ("constraints", constraints)):
        if unknown := sorted(set(given) - names):
            raise ConfigError(f"{argument} names {unknown}, which the model lacks")
    result = ConstrainedTables([], {}, {})
    for found in modules:
        tables, types = {}, {}
        for name, table in found.tables.items():
            own = constraints.get(name, NONE)
            where = f"table {table.name!r} of {found.title}"
            _check(own, where, found, name, topology)
            tables[name] = _with_lookups(table, own, where, local_batch_size, means.get(name))
            types[name] = _allowed(own, where, found.types[name])
            if (own.min_partition or 0) > COLUMN_MULTIPLE:
                result.min_columns[table.name] = own.min_partition
        averages_rows = len(tables) == 1 or all(
            of_table.isdisjoint(WHOLE_TYPES) for of_table in types.values()
        )
        for name, table in tables.items():
            layouts = table.layouts & layouts_of_types(types[name], topology)
            if name in found.averaged and not averages_rows:
                layouts -= {"rows", "host_rows"}
            tables[name] = dataclasses.replace(table, layouts=layouts)
            if types[name].isdisjoint(WHOLE_TYPES):
                result.fixed[table.name] = _fixed(tables[name], types[name], found)
        result.modules.append(dataclasses.replace(found, tables=tables, types=types))
    return result


def passed_on(own: ParameterConstraints | None) -> dict[str, Any]:
    """Return the fields of TorchRec's `ParameterSharding` that a table's constraints state."""
    values = {key: getattr(own, key, None) for key in PASSED_ON}
    return {key: value for key, value in values.items() if value is not None}


def _check(
    own: ParameterConstraints, where: str, found: ModuleTables, name: str, topology: Topology
) -> None:
    """Refuse constraints that contradict the model or the ranks, or that cannot be kept here."""
    reasons = {key: why for key, why in REFUSED.items() if getattr(own, key, None)}
    if own.device_group not in (None, topology.compute_device):
        reasons["device_group"] = f"the ranks compute on {topology.compute_device}"
    features = found.features.get(name)
    if own.feature_names is not None and features not in (None, tuple(own.feature_names)):
        reasons["feature_names"] = f"its features are {list(features or ())}"
    if own.is_weighted and found.is_weighted is False:
        reasons["is_weighted"] = "the module is not weighted"
    for key, why in reasons.items():
        raise ConfigError(
            f"the constraints of {where} have {key}={getattr(own, key)}, and {why}; leave it out"
        )


def _allowed(own: ParameterConstraints, where: str, trained: frozenset[str]) -> frozenset[str]:
    """Return the types under which a table may be trained, by its module and its constraints.

    Only a table that may be nothing else is replicated.
    """
    left = frozenset(
        name
        for name in trained
        if (own.sharding_types is None or name in own.sharding_types)
        and (own.compute_kernels is None or kernel_of(name) in own.compute_kernels)
    )
    if not left:
        raise ConfigError(
            f"the constraints of {where} have sharding_types={own.sharding_types} and "
            f"compute_kernels={own.compute_kernels}, which leave none of "
            f"{', '.join(f'{name} ({kernel_of(name)})' for name in sorted(trained))}"
        )
    return left if left == {REPLICAS} else left - {REPLICAS}


def _fixed(table: Table, types: frozenset[str], found: ModuleTables) -> FixedTable:
    """Return the layout of a table that has to lie in row blocks or replicas."""
    for layout in ("rows", "host_rows", "replicas"):
        if layout in table.layouts:
            return FixedTable(layout, only(types), found.title)
    reason = "replicas need pooled tables in fp32"
    if types & ROW_TYPES:
        is_mean = table.pooled and found.averaged
        reason = MEANS_IN_ROW_BLOCKS if is_mean else "the module has no such row blocks"
    raise ConfigError(
        f"table {table.name!r} of {found.title} has no layout left: {only(types)}, and {reason}"
    )


def _with_lookups(
    table: Table,
    own: ParameterConstraints,
    where: str,
    local_batch_size: float,
    mean: float | Sequence[float] | None,
) -> Table:
    """Return a table with the lookups that its constraints and its pooling factor state.

    TorchRec counts ids as the sum over features of batch size x poolings x pooling factor.

    Args:
        mean: takes precedence over the pooling factors of the constraints.
    """
    num_features = table.num_features
    if isinstance(mean, Sequence) and len(mean) not in (1, num_features):
        raise ConfigError(
            f"pooling_factors of {where} are {len(mean)} numbers; the table has {num_features} "
            "features"
        )
    factor = sum(mean) if isinstance(mean, Sequence) else mean
    lengths = [float(length) for length in own.pooling_factors]
    stated = [own.num_poolings, own.batch_sizes, None if lengths == [1.0] else lengths]
    sizes = {len(values) for values in stated if values}
    if sizes - {num_features} and sizes not in (set(), {1}):
        raise ConfigError(
            f"the constraints of {where} have pooling_factors, num_poolings or batch_sizes of "
            f"{' and '.join(map(str, sorted(sizes)))} features; the table has {num_features}"
        )
    for count in sizes:
        lengths = lengths if len(lengths) == count else lengths * count
        batches = own.batch_sizes or [local_batch_size] * count
        pairs = zip(own.num_poolings or [1.0] * count, batches, strict=True)
        vectors = [poolings * (size / local_batch_size) for poolings, size in pairs]
        if factor is None:
            factor = sum(length * each for length, each in zip(lengths, vectors, strict=True))
        if own.num_poolings or own.batch_sizes:
            num_features = max(1, math.ceil(sum(vectors) - 1e-6))
    factor = table.pooling_factor if factor is None else factor
    return dataclasses.replace(table, pooling_factor=factor, num_features=num_features)
