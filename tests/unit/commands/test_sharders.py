"""A command line names several sharders, and each may have settings of its own."""

import pytest

from dlrm_sharded.commands.sharders import with_sharder_list
from dlrm_sharded.commands.words import checked_names, split_list
from dlrm_sharded.files.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("sharder=dim", "sharders=['dim']"),
        ("sharder=random,search", "sharders=['random','search']"),
        ("sharder=[random, search]", "sharders=['random','search']"),
        (
            "sharder=dim,search;replicate=never;pin={a: [0,1]}",
            "sharders=['dim','search;replicate=never;pin={a: [0,1]}']",
        ),
    ],
)
def test_a_list_becomes_a_value(text, expected):
    assert with_sharder_list(["data=synthetic", text]) == ["data=synthetic", expected]


def test_other_arguments_stay():
    assert with_sharder_list(["seed=1", "out=a,b"]) == ["seed=1", "out=a,b"]


@pytest.mark.parametrize(
    "arguments",
    [["-m"], ["sharder=a", "sharder=b"], ["sharder="], ["sharder=[]"], ["sharder.seed=1"]],
)
def test_what_is_not_clear_is_refused(arguments):
    with pytest.raises(ConfigError):
        with_sharder_list(arguments)


@pytest.mark.parametrize("names", ["dim", [], None, [3], ["dim", "dim"]])
def test_the_list_of_a_config_is_checked(names):
    with pytest.raises(ConfigError):
        checked_names("sharder", names, example="sharder=dim")


def test_commas_in_brackets_do_not_separate():
    assert split_list("a;x=[1,2],b;y={k: (1,2)},c") == ["a;x=[1,2]", "b;y={k: (1,2)}", "c"]
