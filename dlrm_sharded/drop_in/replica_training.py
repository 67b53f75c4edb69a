"""Replicas of tables that have fused optimizers: which may be, and the optimizer they get instead.

TorchRec leaves the fused optimizer of a replica out without a word. Plain SGD and row-wise Adagrad
have an optimizer of replicas that updates their rows alike, see `model.replicas`.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ModuleSharder
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer

from dlrm_sharded.drop_in.find_tables import shardable
from dlrm_sharded.drop_in.module_tables import ModuleTables
from dlrm_sharded.drop_in.optimizer_state import PRICED_AS, fused_type
from dlrm_sharded.files.errors import ConfigError
from dlrm_sharded.model.fused_optimizers import FUSED_EPSILON
from dlrm_sharded.model.replicas import replica_optimizer, replicas_of
from dlrm_sharded.plans.plan import ShardingPlan
from dlrm_sharded.plans.table_optimizers import CAN_REPLICATE


@dataclass(frozen=True, slots=True)
class FusedRule:
    """The fused optimizer of some tables.

    Args:
        optimizer: one of `CAN_REPLICATE`, or the empty text for any that replicas cannot follow.
    """

    optimizer: str
    learning_rate: float = 0.0
    epsilon: float = FUSED_EPSILON


RulesByTable = Mapping[str, FusedRule | None]
"""Fused optimizers by the name of a table; None for a table without one."""


def fused_rules(
    model: nn.Module, sharders: Sequence[ModuleSharder[Any]], modules: Sequence[ModuleTables]
) -> RulesByTable:
    """Return the fused optimizer of each table, attached to it or stated by its sharder."""
    by_path = {found.path: found for found in modules}
    rules: dict[str, FusedRule | None] = {}
    for path, module, sharder in shardable(model, sharders):
        found = by_path[path]
        for name, weight in sharder.shardable_parameters(module).items():
            options = dict(getattr(sharder, "fused_params", None) or {})
            kind = options.pop("optimizer", None)
            if classes := getattr(weight, "_optimizer_classes", None):
                kind, options = fused_type(classes[0], name), dict(weight._optimizer_kwargs[0])
            rate = options.pop("lr", options.pop("learning_rate", 0.01))
            epsilon = options.pop("eps", FUSED_EPSILON)
            optimizer = PRICED_AS.get(getattr(kind, "value", ""), "")
            # modules without configs have other lookups of replicas than collections
            follows = optimizer in CAN_REPLICATE and not options and name in found.features
            rule = FusedRule(optimizer, rate, epsilon) if follows else FusedRule("")
            rules[found.tables[name].name] = None if kind is None else rule
    return rules


def with_replicable(modules: Sequence[ModuleTables], rules: RulesByTable) -> list[ModuleTables]:
    """Return the modules without replicas of the tables that would leave their fused optimizers.

    One lookup has all replicas of a module, so they also need one rule: that of most of its tables.
    """
    result = []
    for found in modules:
        counts = Counter(rules[table.name] for table in found.tables.values())
        [(common, _)] = counts.most_common(1)
        tables = {
            name: table
            if rules[table.name] == common and (common is None or common.optimizer)
            else dataclasses.replace(table, layouts=table.layouts - {"replicas"})
            for name, table in found.tables.items()
        }
        result.append(dataclasses.replace(found, tables=tables))
    return result


def rules_of_replicas(
    plan: ShardingPlan, modules: Sequence[ModuleTables], rules: RulesByTable
) -> dict[str, FusedRule]:
    """Return the rule of a module's replicas by its path, for modules whose tables are fused."""
    replicated = set(plan.replicated_tables)
    return {
        found.path: rule
        for found in modules
        for table in found.tables.values()
        if table.name in replicated and (rule := rules[table.name]) is not None
    }


def optimizer_of_replicas(
    model: DistributedModelParallel, rules: Mapping[str, FusedRule]
) -> KeyedOptimizer:
    """Return the optimizer that trains a model's replicas as their fused optimizer would.

    `in_backward_optimizer_filter` takes them for fused from then on, so that the dense optimizer
    which is made with it leaves them out.

    Args:
        rules: by the path of a module.

    Raises:
        ConfigError: the plan has no replicas that had a fused optimizer.
    """
    parts: list[tuple[str, KeyedOptimizer]] = []
    for path, rule in rules.items():
        for place, module in model.module.get_submodule(path).named_modules():
            if not isinstance(module, ShardedEmbeddingBagCollection):
                continue
            part = replica_optimizer(
                module, rule.optimizer, rule.learning_rate, epsilon=rule.epsilon
            )
            if part is None:
                continue
            for table in (name for replicas in replicas_of(module) for name in replicas.tables):
                # the mark by which the filter knows; DDP has another view of these weights
                module.embedding_bags[table].weight._in_backward_optimizers = [part]
            parts.append((f"{path}.{place}".strip("."), part))
    if not parts:
        raise ConfigError(
            "the plan replicates no table that had a fused optimizer; the dense optimizer trains "
            "the replicas that it may have"
        )
    return CombinedOptimizer(parts)
