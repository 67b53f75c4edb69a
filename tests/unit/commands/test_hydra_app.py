"""Ranks parse the arguments that they need, and wrong ones are refused in one line."""

import pytest
from hydra._internal.utils import get_args_parser

from dlrm_sharded.commands.hydra_app import _arguments
from dlrm_sharded.files.errors import ConfigError

QUIET = ["hydra.run.dir=.", "hydra.output_subdir=null"]


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["seed=1", "hydra.run.dir=mine"],
        ["seed=1", "hydra.run.dir=mine", "--config-dir", "folder"],
        ["--config-dir", "folder", "seed=1", "hydra.run.dir=mine"],
        ["-cn", "mine", "seed=1", "--config-path=elsewhere"],
        ["--config-dir", "folder"],
    ],
    ids=" ".join,
)
def test_overrides_of_quiet_ranks_come_last(arguments):
    """Wherever the user's flags stand; Hydra lets the last of equal overrides win."""
    parse = get_args_parser().parse_args
    assert _arguments(arguments, rank="0", quiet=QUIET) == arguments
    expected = parse(arguments)
    expected.overrides = [*expected.overrides, *QUIET]
    assert parse(_arguments(arguments, rank="1", quiet=QUIET)) == expected


@pytest.mark.parametrize("flag", ["--help", "--hydra-help", "--cfg=job", "--info"])
def test_one_rank_prints_what_a_flag_asks_for(flag):
    assert _arguments([flag], rank="0", quiet=QUIET) == [flag]
    with pytest.raises(SystemExit, match=r"^0$"):
        _arguments([flag], rank="1", quiet=QUIET)


@pytest.mark.parametrize(
    ("arguments", "rank", "words"),
    [
        (["--foo"], "1", "unrecognized arguments: --foo"),
        (["a=1", "--config-dir", "folder", "b=2"], None, "unrecognized arguments: b=2; put flags"),
        (["--cfg", "jobs"], "0", "invalid choice: 'jobs'"),
        (["-m", "seed=1,2"], "0", "every rank would start one"),
    ],
)
def test_arguments_that_cannot_be_used(arguments, rank, words):
    with pytest.raises(ConfigError, match=words):
        _arguments(arguments, rank=rank, quiet=())
