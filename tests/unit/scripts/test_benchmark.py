"""scripts/benchmark.py: the commands that it runs, the order of its rounds, and its tables."""

from pathlib import Path

import numpy as np
import pytest

import benchmark
from dlrm_sharded.datasets.task_sets import TASK_SETS


def test_each_set_is_compared_in_a_folder_of_its_own() -> None:
    commands = benchmark.compare_commands(["paper", "neuroshard_table_1"], Path("out"), ["seed=1"])
    assert [words[1:] for words in commands] == [
        ["task_set=paper", "out=out/paper", "seed=1"],
        ["preset=neuroshard_table_1", "out=out/neuroshard_table_1", "seed=1"],
    ]
    assert set(benchmark.SETS) <= TASK_SETS.keys()


def test_overrides_are_of_plans_alone() -> None:
    options = benchmark.parse(["plans", "--sets", "paper", "num=2"])
    assert (options.sets, options.overrides) == (["paper"], ["num=2"])
    for words in (["plans", "seed"], ["plain", "seed=1"]):
        with pytest.raises(SystemExit):
            benchmark.parse(words)


def test_loops_take_turns_after_a_round_of_warm_up() -> None:
    order: list[str] = []

    def measure(loop: str) -> int:
        order.append(loop)
        return len(order)

    found = benchmark.interleaved({"a": "a", "b": "b"}, 2, measure)
    assert order == ["a", "b", "b", "a", "a", "b"]
    assert found == {"a": [4, 5], "b": [3, 6]}


def test_a_table_has_the_ratios_of_rounds() -> None:
    figures = {
        benchmark.PLAIN: np.array([[10.0, 1.0], [20.0, 3.0], [40.0, 2.0]]),
        benchmark.OURS: np.array([[5.0, 1.0], [12.0, 1.0], [28.0, 1.0]]),
    }
    lines = benchmark.table_of(figures, ("step, ms", "other")).splitlines()
    assert lines[0] == "| loop | step, ms | other | step, ms: over TorchRec's |"
    assert lines[3] == "| dlrm_sharded | 12.00 | 1.00 | 0.600 (0.550 to 0.650) |"
