"""A command line names several sharders, and each may have settings of its own."""

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from dlrm_sharded.commands.sharders import quoted_list
from dlrm_sharded.commands.words import checked_names, value_of
from dlrm_sharded.files.errors import ConfigError


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("sharders=[random, search]", ["random", "search"]),
        (
            "sharders=[dim,search;rows=never,'search;replicate=never;pin={a: [0,1]}']",
            ["dim", "search;rows=never", "search;replicate=never;pin={a: [0,1]}"],
        ),
        ("sharders=dim", ["dim"]),
    ],
)
def test_a_list_becomes_a_value_of_hydra(given, expected):
    [override] = OverridesParser.create().parse_overrides([quoted_list(given)])
    value = override.value()
    assert isinstance(value, str)
    assert checked_names("sharders", value_of(value), example="dim") == expected
    assert quoted_list("out=a,b") == "out=a,b"


@pytest.mark.parametrize("names", [[], None, [3], ["dim", "dim"], 3])
def test_the_list_of_a_config_is_checked(names):
    with pytest.raises(ConfigError):
        checked_names("sharder", names, example="sharder=dim")
