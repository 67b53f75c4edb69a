"""The order of tables in a collection; plans in TorchRec's form are in tests/distributed."""

from dlrm_sharded.model.torchrec_adapter import in_aligned_order
from dlrm_sharded.plans.tables import Table


def test_tables_of_long_powers_of_two_come_first():
    """No order is better than another beyond a GPU's cache line, nor between equal powers."""
    dims = [4, 96, 12, 32, 64, 8, 128, 36]
    tables = [Table(str(dim), 7, dim, 1.0) for dim in dims]
    tables.append(Table("64 in fp16", 7, 64, 1.0, precision="fp16"))
    tables.append(Table("8 in fp16", 7, 8, 1.0, precision="fp16"))
    assert [table.name for table in in_aligned_order(tables)] == [
        *("96", "32", "64", "128", "64 in fp16", "8", "4", "12", "36", "8 in fp16"),
    ]
