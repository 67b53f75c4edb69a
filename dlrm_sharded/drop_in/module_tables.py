"""The tables of one module that TorchRec shards, and what the module can train."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torchrec.distributed.embedding_types import EmbeddingComputeKernel as Kernel
from torchrec.distributed.types import ShardingType

from dlrm_sharded.files.errors import InvalidPlanError
from dlrm_sharded.plans.layouts import layout_name
from dlrm_sharded.plans.plan import Shard, ShardingPlan
from dlrm_sharded.plans.tables import LAYOUTS, Table
from dlrm_sharded.plans.task import Topology

COLUMNS, HOST_COLUMNS = ShardingType.COLUMN_WISE.value, ShardingType.TABLE_COLUMN_WISE.value
ROWS, HOST_ROWS = ShardingType.ROW_WISE.value, ShardingType.TABLE_ROW_WISE.value
REPLICAS = ShardingType.DATA_PARALLEL.value

WHOLE_TYPES = (COLUMNS, HOST_COLUMNS, ShardingType.TABLE_WISE.value)
"""TorchRec's types that train a whole table on one rank; the first one fuses with column shards."""

ROW_TYPES = frozenset({ROWS, HOST_ROWS})
"""TorchRec's types of row blocks."""

PLANNED_TYPES = frozenset({*WHOLE_TYPES, *ROW_TYPES, REPLICAS})
"""TorchRec's types that a plan can have."""

OBEY_LAYOUTS = "use a sharder that reads `Table.layouts` (sharder=search)"

OBEY_REPLICAS = (
    "plan without replicas (sharder.replicate=never, or sharder=torchrec without full=true), or "
    "constrain the table to data_parallel and give it a dense optimizer"
)

MEANS_IN_ROW_BLOCKS = (
    "TorchRec divides the vectors of all tables of a module by the numbers of ids if a table that "
    "pools by the mean lies in row blocks: constrain all tables of its module to row_wise, or give "
    "it a module of its own"
)


def kernel_of(sharding_type: str) -> str:
    """Return the lookup that trains a type here."""
    return str((Kernel.DENSE if sharding_type == REPLICAS else Kernel.FUSED).value)


def layouts_of_types(types: frozenset[str], topology: Topology) -> frozenset[str]:
    """Return the layouts that some of TorchRec's types train, besides the whole table."""
    one_host = topology.ranks_per_host == topology.world_size
    of_layout = _types_of_layout(topology, on_one_host=one_host)
    return frozenset(layout for layout in LAYOUTS if not types.isdisjoint(of_layout[layout]))


def _types_of_layout(
    topology: Topology, *, on_one_host: bool, is_pooled: bool = True
) -> dict[str | None, list[str]]:
    """Return TorchRec's types of each layout, in the order in which a plan prefers them.

    Args:
        on_one_host: whether column shards lie on one host.
    """
    one_host = topology.ranks_per_host == topology.world_size
    whole = WHOLE_TYPES if is_pooled else WHOLE_TYPES[::-1]  # as `ColumnShards` declares
    return {
        None: [*whole, *([ROWS, HOST_ROWS] if topology.world_size == 1 else [])],
        "columns": [COLUMNS, *([HOST_COLUMNS] if on_one_host else [])],
        "rows": [ROWS, *([HOST_ROWS] if one_host else [])],
        "host_rows": [HOST_ROWS],
        "replicas": [REPLICAS],
    }


@dataclass(frozen=True, slots=True)
class ModuleTables:
    """The tables of one module that TorchRec shards.

    Args:
        title: how messages name the module.
        tables: by the name of their parameter, with the layouts that sharders may choose.
        types: TorchRec's types that the module and the constraints allow for each parameter.
        averaged: parameters of the tables that pool by the mean.
        features: names of the features that look up a table, by the name of its parameter; without
            those of modules that have no configs of tables.
        optimizers: fused optimizer of each parameter, a value of `EmbOptimType`; None without one.
        is_weighted: whether ids have weights; None if the module does not say.
        remaps_ids: whether managed collisions map any id to a row.
    """

    path: str
    title: str
    tables: Mapping[str, Table]
    types: Mapping[str, frozenset[str]]
    averaged: frozenset[str]
    features: Mapping[str, tuple[str, ...]]
    optimizers: Mapping[str, str | None]
    is_weighted: bool | None
    remaps_ids: bool

    def torchrec_types(self, plan: ShardingPlan, topology: Topology) -> dict[str, str]:
        """Return TorchRec's type for each parameter.

        Raises:
            InvalidPlanError: the module does not train the shards of a table, TorchRec would take
                the mean of other tables than the model, or a table has another precision than in
                the model.
        """
        shards = plan.shards_by_table()
        types = {}
        for name, table in self.tables.items():
            types[name] = self._torchrec_type(name, shards[table.name], topology)
            planned = shards[table.name][0].precision
            if planned != table.precision:
                raise InvalidPlanError(
                    f"table {table.name!r} of {self.title} is planned in {planned}, and the model "
                    f"has it in {table.precision}; change the data_type of its config, or the "
                    "sharder's table_precision"
                )
        self._check_means(types)
        return types

    def _torchrec_type(self, name: str, shards: Sequence[Shard], topology: Topology) -> str:
        table, allowed = self.tables[name], self.types[name]
        layout = layout_name(shards, table, topology)
        on_one_host = len({shard.rank // topology.ranks_per_host for shard in shards}) == 1
        types = _types_of_layout(topology, on_one_host=on_one_host, is_pooled=table.pooled)[layout]
        for possible in types:
            if possible in allowed:
                return possible
        raise InvalidPlanError(
            f"table {table.name!r} of {self.title} is planned {types[0]}; {only(allowed)}: "
            f"{OBEY_REPLICAS if layout == 'replicas' else OBEY_LAYOUTS}"
        )

    def _check_means(self, types: Mapping[str, str]) -> None:
        """Refuse row blocks of tables that pool by the mean, unless TorchRec takes their mean.

        TorchRec adds row blocks up, and then divides the vectors of all tables of the module by the
        numbers of ids, except for the features of row blocks that pool by the sum.
        """
        in_rows = {name for name, type_name in types.items() if type_name in ROW_TYPES}
        if in_rows.isdisjoint(self.averaged):
            return
        means, sums = set[str](), set[str]()
        for name, features in self.features.items():
            (means if name in self.averaged else sums).update(features)
        wrong = [f"table {name!r}, which is not in row blocks" for name in types.keys() - in_rows]
        wrong += [f"feature {name!r}, which is also pooled by the sum" for name in means & sums]
        if wrong:
            raise InvalidPlanError(
                f"table {min(in_rows & self.averaged)!r} of {self.title} pools by the mean and is "
                f"planned in row blocks; TorchRec would then take a wrong mean for {min(wrong)}: "
                f"give tables that pool by the mean a module of their own, or {OBEY_LAYOUTS}"
            )


def only(types: frozenset[str]) -> str:
    """Return the clause of messages on the types that a table may have."""
    return f"its constraints and its TorchRec sharder allow only {', '.join(sorted(types))}"
