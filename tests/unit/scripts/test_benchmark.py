"""scripts/benchmark.py: the commands that it runs."""

from pathlib import Path

import pytest

import benchmark


def test_each_set_is_compared_in_a_folder_of_its_own() -> None:
    commands = benchmark.compare_commands(["paper", "neuroshard_table_1"], Path("out"), ["seed=1"])
    assert [words[1:] for words in commands] == [
        ["task_set=paper", "out=out/paper", "seed=1"],
        ["preset=neuroshard_table_1", "out=out/neuroshard_table_1", "seed=1"],
    ]


def test_the_sets_of_the_default_are_there() -> None:
    assert len(benchmark.compare_commands(benchmark.SETS, Path("out"), [])) == 4


def test_a_set_that_is_not_there_is_refused() -> None:
    with pytest.raises(SystemExit, match="no preset or task set is named papers; known: autoshard"):
        benchmark.compare_commands(["papers"], Path("out"), [])
