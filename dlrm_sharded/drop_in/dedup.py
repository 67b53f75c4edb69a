"""The sharders of a model that deduplicate ids, and plans that say which should."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from torchrec.distributed.types import ModuleSharder

from dlrm_sharded.drop_in.find_tables import shardable
from dlrm_sharded.files.errors import InvalidPlanError
from dlrm_sharded.plans.plan import ShardingPlan


def deduplicating_modules(
    model: nn.Module, sharders: Sequence[ModuleSharder[Any]]
) -> tuple[str, ...]:
    """Return the paths of the modules whose sharder has `use_index_dedup`, sorted.

    A sharder does it for all modules of its type, whatever a plan says.
    """
    return tuple(
        sorted(
            path
            for path, _, sharder in shardable(model, sharders)
            if getattr(sharder, "_use_index_dedup", False)
        )
    )


def check_dedup(plan: ShardingPlan, modules: Sequence[str]) -> None:
    """Refuse a plan with deduplicated ids that would train without.

    Args:
        modules: those that deduplicate ids.

    Raises:
        InvalidPlanError: the sharder of a module lacks `use_index_dedup`.
    """
    if lacking := sorted(set(plan.dedup) - set(modules)):
        raise InvalidPlanError(
            f"the plan deduplicates the ids of module {lacking[0]!r}, and its sharder does not: "
            "use EmbeddingCollectionSharder(use_index_dedup=True), or plan with dedup=never"
        )
