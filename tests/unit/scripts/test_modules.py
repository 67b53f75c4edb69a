"""Steps of models with bags, sequences or both: their tasks, and what the report says."""

import pytest

from benchmarks import modules

EXCHANGES = {"bags, drawn": 0.2, "bags, wide": 0.7}


@pytest.mark.parametrize("kind", modules.KINDS)
@pytest.mark.parametrize("number", [0, 1], ids=modules.SHAPES)
def test_kinds_of_tables(kind, number):
    task = modules.task_of_kind(kind, number, 2, seed=0)
    pooled = {table.pooled for table in task.tables}
    assert pooled == {"bags": {True}, "sequences": {False}, "both": {True, False}}[kind]
    assert len({table.embedding_dim for table in task.tables if not table.pooled}) <= 1
    assert all(table.reuse_histogram is not None for table in task.tables)
    assert task == modules.task_of_kind(kind, number, 2, seed=0)


def rows(ours_ms, blind_ms, told_ms, *, kind="bags, drawn", number=0):
    steps_ms = dict(zip(modules.SHARDERS, (ours_ms, blind_ms, told_ms), strict=True))
    return [
        {"set": kind, "number": number, "world_size": 2, "sharder": sharder, "median_ms": ms}
        | {"exchange_share": EXCHANGES[kind], "step_ms": [0.99 * ms, ms, 1.01 * ms]}
        for sharder, ms in steps_ms.items()
    ]


def test_best_of_the_others_is_that_of_each_task():
    text = modules.report(
        [
            *rows(10.0, 20.0, 12.5),
            *rows(10.0, 10.0, 40.0, number=2),
            *rows(30.0, 40.0, 36.0, kind="bags, wide", number=1),
        ],
        None,
    )
    lines = {cells[0]: cells[1:] for cells in _cells(text)}
    assert lines["bags, drawn"][4].startswith("0.9000 [")
    assert lines["bags, drawn"][5] == "1/1/0"
    wide = ["1", "70", "0.7500", "0.8333", "0.8333", "1/0/0"]
    assert lines["bags, wide"] == lines["exchanges above 50%"] == wide
    assert lines["bags, drawn 2"] == ["20", "10.0", "10.0", "40.0", "1.000 [1.000, 1.000]"]


def test_sharder_without_a_plan_is_no_best_one():
    found = [row for row in rows(10.0, 5.0, 20.0) if row["sharder"] != "torchrec_blind"]
    lines = {cells[0]: cells[1:] for cells in _cells(modules.report(found, None))}
    assert lines["bags, drawn 0"] == ["20", "10.0", "20.0", "0.500 [0.500, 0.500]"]


def _cells(text):
    return [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text.splitlines()
        if line.startswith("|")
    ]
