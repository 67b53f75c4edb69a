"""A log that cannot be written costs a line, and no run."""

import logging
from pathlib import Path

import pytest

from dlrm_sharded.commands.log_file import LogFile


def test_a_file_that_cannot_be_opened_is_said_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is opened for its first line: by then it may be another user's, or its folder gone."""
    handler = LogFile(tmp_path / "gone" / "train.log", delay=True)
    logger = logging.Logger("of a run")
    logger.addHandler(handler)
    for number in range(3):
        logger.warning("line %d", number)
    path = tmp_path / "gone" / "train.log"
    assert capsys.readouterr().err == f"the log ends here: {path}: No such file or directory\n"
