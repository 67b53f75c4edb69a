"""A run that goes on outside the sweep that began it keeps its plan."""

from types import SimpleNamespace

import pytest

from dlrm_sharded.job.start import Start

SHARDS = {"world_size": 2, "shards": []}
IN_SWEEP = {
    "sharder": {"seed": 0, "pin": None, "of_an_earlier_version": 1},
    "cost_model": {"artifact": None, "snapshot": "sweep/prices"},
    "cost_model_snapshot": "sweep/prices",
    "price_snapshot": "sweep/prices",  # the same, of 0.2
    "resume": None,
    "seed": 0,
}
ALONE = {
    **{key: IN_SWEEP[key] for key in ("sharder", "seed")},
    "cost_model": {"artifact": None, "snapshot": None},
    "cost_model_snapshot": None,
    "resume": "auto",
}


def start(plan=SHARDS):
    state = SimpleNamespace(run="it", world_size=2, config=IN_SWEEP, plan=plan)
    return Start(
        run="it",
        num_interruptions=1,
        resumed=SimpleNamespace(state=state),
        weights=None,
        damaged=(),
    )


@pytest.mark.parametrize(
    ("change", "keeps", "is_alike"),
    [
        ({}, True, True),
        ({"seed": 1}, True, False),
        ({"cost_model": {"artifact": "mine", "snapshot": None}}, False, False),
        ({"cost_model": None}, False, False),
        ({"sharder": {"seed": 1, "pin": None}}, False, False),
        ({"sharder": {"seed": 0, "pin": None, "of_a_later_version": 2}}, True, False),
        ({"sharder": {"seed": 0, "pin": {"a": [1]}}}, False, False),
    ],
    ids=str,
)
def test_what_a_sweep_says_of_a_start_decides_nothing(change, keeps, is_alike):
    config = ALONE | change
    assert (start().plan_to_keep(config, world_size=2) is not None) == keeps
    assert start().goes_on_alike(config) == is_alike


def test_a_plan_that_only_an_earlier_release_could_train_is_not_kept():
    shard = {"table": "a", "rank": 0, "rows": [0, 8], "cols": [0, 4], "load_factor": 0.5}
    assert start(SHARDS).checkpoint_plan() is not None
    assert start(SHARDS | {"shards": [shard]}).plan_to_keep(ALONE, world_size=2) is None
