"""Sharders that deduplicate ids, and plans that say so."""

import pytest
from torch import nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

from dlrm_sharded import InvalidPlanError
from dlrm_sharded.drop_in.dedup import check_dedup, deduplicating_modules
from dlrm_sharded.plans.plan import ShardingPlan


def model() -> nn.Module:
    one = {"num_embeddings": 8, "embedding_dim": 8, "feature_names": ["f"]}
    return nn.ModuleDict(
        {
            "bags": EmbeddingBagCollection([EmbeddingBagConfig(name="bags", **one)]),
            "late": EmbeddingCollection([EmbeddingConfig(name="late", **one)]),
            "early": EmbeddingCollection([EmbeddingConfig(name="early", **one)]),
        }
    )


@pytest.mark.parametrize("use_index_dedup", [True, False])
def test_a_sharder_deduplicates_the_ids_of_all_its_modules(use_index_dedup: bool) -> None:
    sharders = [
        EmbeddingBagCollectionSharder(),
        EmbeddingCollectionSharder(use_index_dedup=use_index_dedup),
    ]
    expected = ("early", "late") if use_index_dedup else ()
    assert deduplicating_modules(model(), sharders) == expected


def test_a_plan_with_deduplicated_ids_needs_a_sharder_that_does_it() -> None:
    plan = ShardingPlan(1, (), dedup=("early",))
    check_dedup(plan, ["early"])
    with pytest.raises(InvalidPlanError, match=r"'early'.*use_index_dedup=True"):
        check_dedup(plan, [])
