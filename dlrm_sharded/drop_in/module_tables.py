"""The tables of one module that TorchRec shards, and what the module can train."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torchrec.distributed.types import ShardingType

from dlrm_sharded.files.errors import InvalidPlanError
from dlrm_sharded.plans.layouts import layout_name
from dlrm_sharded.plans.plan import Shard, ShardingPlan
from dlrm_sharded.plans.tables import Table
from dlrm_sharded.plans.task import Topology

log = logging.getLogger(__name__)

WHOLE_TYPES = (
    ShardingType.COLUMN_WISE.value,  # first, as it fuses with column shards
    ShardingType.TABLE_COLUMN_WISE.value,
    ShardingType.TABLE_WISE.value,
)
"""TorchRec's types that train a whole table on one rank."""

ROW_TYPES = frozenset({ShardingType.ROW_WISE.value, ShardingType.TABLE_ROW_WISE.value})
"""TorchRec's types of row blocks."""

PLANNED_TYPES = frozenset({*WHOLE_TYPES, *ROW_TYPES, ShardingType.DATA_PARALLEL.value})
"""TorchRec's types that a plan can have."""

OBEY_LAYOUTS = "use a sharder that reads `Table.layouts` (sharder=search)"


def layouts_of_types(types: frozenset[str], topology: Topology) -> frozenset[str]:
    """Return the layouts that some of TorchRec's types train, besides the whole table."""
    one_host = topology.ranks_per_host == topology.world_size
    columns, host_columns, _ = WHOLE_TYPES
    host_rows = ShardingType.TABLE_ROW_WISE.value in types
    trained = {
        "columns": columns in types or (one_host and host_columns in types),
        "rows": ShardingType.ROW_WISE.value in types or (one_host and host_rows),
        "host_rows": host_rows,
        "replicas": ShardingType.DATA_PARALLEL.value in types,
    }
    return frozenset(layout for layout, is_trained in trained.items() if is_trained)


@dataclass(frozen=True, slots=True)
class ModuleTables:
    """The tables of one module that TorchRec shards.

    Args:
        title: how messages name the module.
        tables: by the name of their parameter.
        sharding_types: TorchRec's types under which the module trains.
        is_pooled: whether the module pools; if not, it looks up sequences.
        averaged: parameters of the tables that pool by the mean. Among several tables, row blocks
            are not in their layouts, because one cannot lie so by itself; see `check`.
        summed_and_averaged: features that tables pool by the sum, and others by the mean.
        features: names of the features that look up a table, by the name of its parameter; without
            those of modules that have no configs of tables.
        is_weighted: whether ids have weights; None if the module does not say.
        remaps_ids: whether managed collisions map any id to a row.
        allowed: types that the user allows for a table, by its name; all types if it is missing.
    """

    path: str
    title: str
    tables: Mapping[str, Table]
    sharding_types: frozenset[str]
    is_pooled: bool
    averaged: frozenset[str]
    summed_and_averaged: frozenset[str]
    features: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    is_weighted: bool | None = None
    remaps_ids: bool = False
    allowed: Mapping[str, frozenset[str]] = field(default_factory=dict)

    @property
    def averages_all(self) -> bool:
        """Return whether all tables pool by the mean; then all or none train in row blocks."""
        return self.averaged >= self.tables.keys()

    @property
    def why_no_row_blocks(self) -> str | None:
        """Why tables that pool by the mean are not put into row blocks here; None without such."""
        summed = [table.name for key, table in self.tables.items() if key not in self.averaged]
        averaged = [table.name for key, table in self.tables.items() if key in self.averaged]
        if not (summed and averaged):
            return None
        return (
            f"table {averaged[0]!r} of {self.title} pools by the mean beside table {summed[0]!r}, "
            "which pools by the sum, and TorchRec divides the vectors of both if one of them is in "
            "row blocks: give them modules of their own"
        )

    def torchrec_type(self, shards: Sequence[Shard], table: Table, topology: Topology) -> str:
        """Return TorchRec's type for the shards of a table.

        Raises:
            InvalidPlanError: the module does not train them.
        """
        one_host = topology.ranks_per_host == topology.world_size
        on_one_host = len({shard.rank // topology.ranks_per_host for shard in shards}) == 1
        layout = layout_name(shards, table, topology)
        is_trained = ShardingType.DATA_PARALLEL.value in self.sharding_types
        if layout == "replicas" and is_trained and layout not in table.layouts:
            raise InvalidPlanError(
                f"table {table.name!r} of {self.title} is planned data_parallel, which no "
                f"constraint of it says; {OBEY_LAYOUTS}"
            )
        columns, host_columns, _ = WHOLE_TYPES
        rows, host_rows = ShardingType.ROW_WISE.value, ShardingType.TABLE_ROW_WISE.value
        whole = WHOLE_TYPES if self.is_pooled else WHOLE_TYPES[::-1]  # as `ColumnShards` declares
        types = {
            None: [*whole, *([rows, host_rows] if topology.world_size == 1 else [])],
            "columns": [columns, *([host_columns] if on_one_host else [])],
            "rows": [rows, *([host_rows] if one_host else [])],
            "host_rows": [host_rows],
            "replicas": [ShardingType.DATA_PARALLEL.value],
        }[layout]
        trained = self.allowed.get(table.name, self.sharding_types)
        for name in types:
            if name in trained:
                return name
        by = "its TorchRec sharder trains it"
        if trained != self.sharding_types:
            by = "its constraints allow"
        raise InvalidPlanError(
            f"table {table.name!r} of {self.title} is planned {types[0]}, and {by} only "
            f"{', '.join(sorted(trained))}; {OBEY_LAYOUTS}"
        )

    def check(self, plan: ShardingPlan, topology: Topology) -> None:
        """Refuse shards that the module as a whole does not train.

        Raises:
            InvalidPlanError: TorchRec would take the mean of other tables than the model, or a
                table has another precision than in the model.
        """
        shards = plan.shards_by_table()
        self._check_means(shards, topology)
        for table in self.tables.values():
            planned = shards[table.name][0].precision
            if planned != table.precision:
                raise InvalidPlanError(
                    f"table {table.name!r} of {self.title} is planned in {planned}, and the model "
                    f"has it in {table.precision}; change the data_type of its config, or the "
                    "sharder's table_precision"
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
        elif cut := [name for names in self.features.values() for name in names if "@" in name]:
            reason = f"fails (KeyError), as it cuts the name of feature {cut[0]!r} at the @"
        if reason is not None:
            raise InvalidPlanError(
                f"table {min(in_rows & self.averaged)!r} of {self.title} pools by the mean and is "
                f"planned in row blocks, whose vectors TorchRec divides by the numbers of ids; it "
                f"{reason}: give such tables a module of their own, or {OBEY_LAYOUTS}"
            )
