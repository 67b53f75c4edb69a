"""The end of a training whose folder is gone."""

from unittest.mock import MagicMock

import pytest

from dlrm_sharded.files.errors import UnsavedError
from dlrm_sharded.job import train_and_save
from dlrm_sharded.job.owned_folder import RunFolder


def test_a_folder_that_is_gone_costs_the_result_alone(monkeypatch, tmp_path):
    for name in ("run_result", "closing_text", "device_name"):
        monkeypatch.setattr(train_and_save, name, MagicMock())
    gone = FileNotFoundError(2, "No such file or directory", str(tmp_path))
    prepared = MagicMock(folder=RunFolder(tmp_path, MagicMock(side_effect=gone)))
    planned = MagicMock()
    planned.memory.estimated_peak_bytes.return_value = 0
    with pytest.raises(UnsavedError, match=r"is finished, but its result is lost: .* No such file"):
        train_and_save.conclude(prepared, planned, MagicMock(), MagicMock())
    assert list(tmp_path.iterdir()) == []
