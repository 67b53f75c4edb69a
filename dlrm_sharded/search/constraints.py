"""Requirements of users on a plan, besides a low cost, which are keys of `sharder=search`.

Letters: U units, W ranks, S sets of tables that are kept apart; see `problem.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dlrm_sharded.files.errors import ConfigError, InfeasibleTaskError, check_count, check_number
from dlrm_sharded.plans.plan import ShardingPlan, read_plan
from dlrm_sharded.plans.table_optimizers import why_not_replicated
from dlrm_sharded.plans.task import GIB, MAX_BYTES, ShardingTask, Topology
from dlrm_sharded.plans.validation import validate


@dataclass(frozen=True, slots=True)
class Constraints:
    """Restrictions on the ranks and the splits of tables, and on changes to an earlier plan.

    Args:
        pin: ranks that may hold a table, by its name. The table has row blocks only on groups of
            these ranks.
        together: sets of tables that share a rank and are not split.
        apart: sets of tables no two of which share a rank; they are not split by rows.
        unsplit: tables that stay whole.
        reserved_gib: memory that tables leave free on each rank; one number, or one per rank.
        replicate: "auto" for replicas wherever they pay, "never", or the tables that are replicated
            and no others. Only tables that no other restriction names can be replicated.
        split: "auto" for splits wherever they pay, or "never" to keep tables whole.
        rows: the same for splits by rows alone.
        warm_start: plan.json of an earlier plan, from which the search descends.
        max_moved_tables, max_moved_gib: limits on tables and memory that move away from the earlier
            plan; None for no limit.

    Raises:
        ConfigError: a value has the wrong form, or limits are given without `warm_start`.
    """

    pin: Mapping[str, Sequence[int]] = field(default_factory=dict)
    together: Sequence[Sequence[str]] = ()
    apart: Sequence[Sequence[str]] = ()
    unsplit: Sequence[str] = ()
    reserved_gib: float | Sequence[float] = 0.0
    replicate: str | Sequence[str] = "auto"
    split: str = "auto"
    rows: str = "auto"
    warm_start: str | Path | None = None
    max_moved_tables: int | None = None
    max_moved_gib: float | None = None

    def __post_init__(self) -> None:
        self._check_form()
        self._check_moves()
        reserved = self.reserved_gib
        for gib in reserved if isinstance(reserved, Sequence) else [reserved]:
            check_number("sharder.reserved_gib", gib)
        seen: set[str] = set()
        for group in self.together:
            for name in group:
                if name in seen:
                    raise ConfigError(
                        f"sharder.together has table {name!r} twice; make one group of its tables"
                    )
                seen.add(name)

    def check(self, task: ShardingTask) -> None:
        """Raise ConfigError if the task lacks a table or rank, or if two constraints conflict."""
        names = {table.name for table in task.tables}
        mentioned = {
            "pin": list(self.pin),
            "together": [name for group in self.together for name in group],
            "apart": [name for group in self.apart for name in group],
            "unsplit": list(self.unsplit),
            "replicate": list(self._replicated),
        }
        for key, tables in mentioned.items():
            for name in tables:
                if name not in names:
                    raise ConfigError(f"sharder.{key} names a table {name!r} that the task lacks")
        world_size = task.topology.world_size
        for name, ranks in self.pin.items():
            if not ranks:
                raise ConfigError(f"sharder.pin gives table {name!r} no ranks")
            for rank in ranks:
                if isinstance(rank, bool) or not isinstance(rank, int):
                    raise ConfigError(f"sharder.pin.{name} has {rank!r}, not the number of a rank")
                if not 0 <= rank < world_size:
                    raise ConfigError(
                        f"sharder.pin puts table {name!r} on rank {rank}; "
                        f"the ranks are 0 to {world_size - 1}"
                    )
        for group in self.together:
            for other in self.apart:
                both = sorted(set(group) & set(other))
                if len(both) > 1:
                    raise ConfigError(f"sharder.together and sharder.apart both have {both}")
            if not self._common_ranks(group, world_size):
                raise ConfigError(
                    f"sharder.pin leaves no rank for the tables {list(group)}, which stay together"
                )
        for group in self.apart:
            self._check_apart(group)
        self._check_replicated(mentioned, task)

    def capacity(self, topology: Topology) -> NDArray[np.int64]:
        """Return [W], memory of each rank that tables may use, in bytes.

        Raises:
            ConfigError: `reserved_gib` does not have one number for each rank.
            InfeasibleTaskError: it leaves nothing on any rank.
        """
        reserved = self.reserved_gib
        if not isinstance(reserved, int | float) and len(reserved) != topology.world_size:
            raise ConfigError(
                f"sharder.reserved_gib has {len(reserved)} values for {topology.world_size} ranks"
            )
        capacity = np.array(topology.rank_memory_bytes, dtype=np.int64)
        reserved_bytes = np.minimum(np.array(reserved, dtype=np.float64), MAX_BYTES / GIB) * GIB
        left = capacity - reserved_bytes.astype(np.int64)
        if (left <= 0).all():
            raise InfeasibleTaskError(
                f"no plan can fit: sharder.reserved_gib leaves nothing of the "
                f"{capacity.max() / GIB:.2f} GiB of any rank"
            )
        return np.maximum(left, 0)

    def allowed(self, units: Sequence[Sequence[str]], world_size: int) -> NDArray[np.bool_] | None:
        """Return [U, W], ranks that may hold units of these tables; None if nothing is pinned.

        Args:
            units: names of each unit's tables; all of them must be allowed on a rank.
        """
        if not self.pin:
            return None
        allowed = np.zeros((len(units), world_size), dtype=bool)
        for unit, tables in enumerate(units):
            allowed[unit, list(self._common_ranks(tables, world_size))] = True
        return allowed

    def separated(self, units: Sequence[Sequence[str]]) -> NDArray[np.bool_]:
        """Return [U, S], whether a unit has a table in a set of `apart`.

        Args:
            units: names of each unit's tables.
        """
        member = np.zeros((len(units), len(self.apart)), dtype=bool)
        for i, names in enumerate(self.apart):
            member[:, i] = [not set(names).isdisjoint(tables) for tables in units]
        return member

    def earlier_plan(self, task: ShardingTask) -> ShardingPlan | None:
        """Return the earlier plan to start from; None without `warm_start`.

        Raises:
            ConfigError: the file is missing or is not JSON.
            InvalidPlanError: it is not a valid plan for the task.
        """
        if self.warm_start is None:
            return None
        plan = read_plan(self.warm_start)
        validate(plan, task)
        return plan

    def must_replicate(self, units: Sequence[Sequence[str]]) -> NDArray[np.bool_]:
        """Return [U], whether a unit is a table that must be replicated."""
        replicated = set(self._replicated)
        return np.array([not replicated.isdisjoint(tables) for tables in units], dtype=bool)

    @property
    def can_split(self) -> bool:
        return self.split == "auto"

    @property
    def can_split_rows(self) -> bool:
        return self.can_split and self.rows == "auto"

    @property
    def _replicated(self) -> Sequence[str]:
        return () if isinstance(self.replicate, str) else self.replicate

    def _check_replicated(self, mentioned: Mapping[str, Sequence[str]], task: ShardingTask) -> None:
        """Raise ConfigError if a table to replicate cannot be, or has another restriction."""
        if self._replicated and not task.can_replicate:
            assert task.known_optimizer is not None
            raise ConfigError(
                f"sharder.replicate names {sorted(self._replicated)}, and the optimizer of the "
                f"tables is {why_not_replicated(task.known_optimizer)}"
            )
        for key, tables in mentioned.items():
            both = sorted(set(tables) & set(self._replicated))
            if key != "replicate" and both:
                raise ConfigError(
                    f"sharder.replicate and sharder.{key} both name {both}; a replica lies on all "
                    "ranks, so drop one of the two"
                )

    def _check_form(self) -> None:
        if not isinstance(self.pin, Mapping):
            raise ConfigError(f"sharder.pin is {self.pin!r}; it must have lists of ranks by table")
        for name, ranks in self.pin.items():
            _check_list(f"sharder.pin.{name}", ranks, "ranks")
        for key in ("together", "apart"):
            _check_list(f"sharder.{key}", getattr(self, key), "lists of tables")
            for group in getattr(self, key):
                _check_list(f"a group of sharder.{key}", group, "tables")
        _check_list("sharder.unsplit", self.unsplit, "tables")
        for key in ("split", "rows"):
            if (value := getattr(self, key)) not in ("auto", "never"):
                raise ConfigError(f"sharder.{key} is {value!r}; it must be auto or never")
        if isinstance(self.replicate, str) and self.replicate in ("auto", "never"):
            return
        if isinstance(self.replicate, str) or not isinstance(self.replicate, Sequence):
            raise ConfigError(
                f"sharder.replicate is {self.replicate!r}; it must be auto, never or a list "
                "of tables"
            )

    def _check_moves(self) -> None:
        tables, gib = self.max_moved_tables, self.max_moved_gib
        if tables is not None:
            check_count("sharder.max_moved_tables", tables, least=0)
        if gib is not None:
            check_number("sharder.max_moved_gib", gib, most=MAX_BYTES / GIB)
        if self.warm_start is None and (tables is not None or gib is not None):
            raise ConfigError(
                "sharder.max_moved_tables and sharder.max_moved_gib limit moves away from an "
                "earlier plan; name its plan.json in sharder.warm_start"
            )

    def _check_apart(self, group: Sequence[str]) -> None:
        """Raise ConfigError if two of the tables are pinned to the same single rank."""
        only: dict[int, str] = {}
        for name in dict.fromkeys(group):
            ranks = list(set(self.pin.get(name, ())))
            if len(ranks) == 1 and only.setdefault(ranks[0], name) != name:
                raise ConfigError(
                    f"sharder.apart has {only[ranks[0]]!r} and {name!r}, but sharder.pin "
                    f"puts both on rank {ranks[0]}"
                )

    def _common_ranks(self, group: Sequence[str], world_size: int) -> set[int]:
        ranks = set(range(world_size))
        for name in group:
            ranks &= set(self.pin.get(name, range(world_size)))
        return ranks


def _check_list(key: str, value: object, items: str) -> None:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise ConfigError(f"{key} is {value!r}; it must be a list of {items}")
