"""Order and names of tables in a collection; plans in TorchRec's form are in tests/distributed."""

import pytest
import torch
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from dlrm_sharded.model.torchrec_adapter import (
    bag_configs,
    in_aligned_order,
    module_name,
    table_name,
)
from dlrm_sharded.plans.tables import Table


def test_tables_of_long_powers_of_two_come_first():
    """No order is better than another beyond a GPU's cache line, nor between equal powers."""
    dims = [4, 96, 12, 32, 64, 8, 128, 36]
    tables = [Table(str(dim), 7, dim, 1.0) for dim in dims]
    tables.append(Table("64 in fp16", 7, 64, 1.0, precision="fp16"))
    tables.append(Table("8 in fp16", 7, 8, 1.0, precision="fp16"))
    assert [table.name for table in in_aligned_order(tables)] == [
        *("96", "32", "64", "128", "64 in fp16", "8", "4", "12", "36", "8 in fp16")
    ]


@pytest.mark.parametrize(
    "name",
    ["user.id", "a/b c,d=1", "größe", "..a.", "%2E", "50%", "type", "keys", "training", "__call__"],
)
def test_torch_takes_every_name_of_a_table(name):
    tables = [Table(name, 7, 8, 1.0), Table("cat_0", 7, 8, 1.0)]
    bags = EmbeddingBagCollection(tables=bag_configs(tables), device=torch.device("meta"))
    assert [table_name(module) for module in bags.embedding_bags] == [name, "cat_0"]
    assert [config.feature_names for config in bags.embedding_bag_configs()] == [[name], ["cat_0"]]


def test_usual_names_stay_as_they_are():
    """Otherwise, exports of TorchRec's own state would change."""
    for name in ("t0", "cat_20", "item-id", "user id", "a/b", "größe", "weight", "0"):
        assert module_name(name) == name
