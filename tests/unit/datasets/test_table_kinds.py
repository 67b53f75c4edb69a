"""Kinds of tables: halves that share nothing, and the ranges they promise."""

import pytest

from dlrm_sharded.datasets.table_kinds import HALVES, TABLE_KINDS
from dlrm_sharded.plans.task import GIB


@pytest.mark.parametrize("kind", TABLE_KINDS)
def test_tables_of_a_kind_come_in_halves(kind):
    halves = [TABLE_KINDS[kind](half) for half in HALVES]
    assert not {*halves[0]} & {*halves[1]}
    for half in halves:
        assert len({table.name for table in half}) == len(half)
        assert max(4 * t.num_embeddings * t.embedding_dim for t in half) <= GIB // 2


def test_varied_tables_have_the_range_of_real_ones():
    tables = TABLE_KINDS["varied"]("training")
    rows, ids = ([getattr(t, key) for t in tables] for key in ("num_embeddings", "pooling_factor"))
    assert (min(rows), max(rows)) == (3, pytest.approx(2**29 / 16, rel=0.1))
    assert (min(ids), max(ids)) == (pytest.approx(0.3, rel=0.1), pytest.approx(400, rel=0.1))
    assert sum(num_ids == 1.0 for num_ids in ids) / len(ids) == pytest.approx(0.3, abs=0.05)
