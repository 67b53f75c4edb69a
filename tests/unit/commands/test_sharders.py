"""A command line names several sharders, and each may have settings of its own."""

import pytest

from dlrm_sharded.commands.sharders import quoted_lists
from dlrm_sharded.commands.words import checked_names, split_list
from dlrm_sharded.files.errors import ConfigError


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("sharders=[random, search]", "sharders=['random','search']"),
        (
            "sharders=[dim,search;replicate=never;pin={a: [0,1]}]",
            "sharders=['dim','search;replicate=never;pin={a: [0,1]}']",
        ),
        ("out=a,b", "out=a,b"),
    ],
)
def test_a_list_becomes_a_value_of_hydra(given, expected):
    assert quoted_lists(["tasks=x", given]) == ["tasks=x", expected]


@pytest.mark.parametrize("names", ["dim", [], None, [3], ["dim", "dim"]])
def test_the_list_of_a_config_is_checked(names):
    with pytest.raises(ConfigError):
        checked_names("sharder", names, example="sharder=dim")


def test_commas_in_brackets_do_not_separate():
    assert split_list("a;x=[1,2],b;y={k: (1,2)},c") == ["a;x=[1,2]", "b;y={k: (1,2)}", "c"]
