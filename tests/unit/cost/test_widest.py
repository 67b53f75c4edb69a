"""What a GPU's widest shard adds: its terms, and that a fit finds it on a synthetic GPU."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrm_sharded.cost.features import DEVICE_WORK, work_of
from dlrm_sharded.cost.widest import WidestShard, crowding_terms, widest_terms
from dlrm_sharded.cost.workload import Workload, workload_of_plan, workload_of_tables
from tests.unit.cost.plans import Planned, planned
from tests.unit.search.synthetic import model_of
from tests.unit.synthetic import USED_ONCE, tables_of

GPU = DEVICE_WORK["cuda"]
COLUMNS = WidestShard(np.ones((2, 2))).columns


def workload(*shards: tuple[int, float]) -> Workload:
    """Shards of so many columns and ids a step, all on one rank."""
    shapes = [(1000, num_cols, num_ids / 64, USED_ONCE) for num_cols, num_ids in shards]
    return workload_of_tables(tables_of(*shapes), 64)


@pytest.mark.parametrize(
    ("num_cols", "warps"),
    [(4, 0.25), (32, 0.25), (36, 0.5), (64, 0.5), (68, 1), (128, 1), (132, 2), (2048, 16)],
)
def test_thread_groups(num_cols: int, warps: float) -> None:
    """FBGEMM has groups of 8, 16 and 32 threads, and then of full warps; a thread has 4 columns."""
    of = workload((num_cols, 3000.0))
    assert work_of(of, GPU)[0, GPU.terms.index("id_warps")] == 3 * warps
    [[first, following]] = widest_terms(COLUMNS(of), COLUMNS(of))
    assert (first, following) == (3 * min(warps, 1), 3 * max(warps - 1, 0))


def test_all_ids_count_as_much_as_those_of_the_widest_shard() -> None:
    of = COLUMNS(workload((16, 2000.0), (128, 1000.0), (512, 0.0)))
    narrow, wide, widest = of
    for crowd, per_id in ((narrow, (0.25, 0)), (narrow + wide, (1, 0)), (of.sum(axis=0), (1, 3))):
        assert widest_terms(narrow[None], crowd[None]).tolist() == [[2 * per_id[0], 2 * per_id[1]]]
    # added and taken away again, nothing of the widest shard remains
    assert widest_terms(narrow[None], (narrow + wide + widest - widest - wide)[None])[0, 0] == 0.5
    assert crowding_terms(narrow, wide).tolist() == [2 * 0.75, 0]
    assert not crowding_terms(narrow, narrow).any()
    assert not crowding_terms(wide, 0 * narrow).any()


@given(of=planned(), seed=st.integers(0, 3))
def test_time_of_a_rank_is_that_of_its_shards_together(of: Planned, seed: int) -> None:
    compute = model_of("warps", seed).compute
    shards = workload_of_plan(*of)
    vectors = compute.vectors(shards)
    sums = shards.by_rank(vectors)
    lookups = shards.num_lookups()
    together = shards.by_rank(compute.work_ms(vectors, sums[shards.rank]))
    times = compute.times_ms(sums, lookups)
    np.testing.assert_allclose(times, together + compute.launch_ms(lookups), rtol=1e-9, atol=1e-12)
    # one shard after another, and the same when they come in another order
    for order in (np.arange(len(vectors)), np.arange(len(vectors))[::-1]):
        growing, added_ms = np.zeros_like(sums), np.zeros((len(sums), 2))
        for i in order.tolist():
            rank = shards.rank[i]
            added_ms[rank] += compute.crowding_ms(vectors[i], growing[rank])
            growing[rank] += vectors[i]
        alone = shards.by_rank(compute.work_ms(vectors, vectors))
        same_read = vectors.copy()
        same_read[:, -1] = sums[shards.rank, -1]
        apart = shards.by_rank(compute.work_ms(vectors, same_read))
        np.testing.assert_allclose(together, apart + added_ms, rtol=1e-9, atol=1e-12)
        assert (together >= alone * (1 - 1e-9)).all()
