"""The end of a training whose folder is no longer its own."""

from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from dlrm_sharded.files.errors import LostFolderError, UnsavedError
from dlrm_sharded.job import conclude as conclusion
from dlrm_sharded.job.run_folder import RunFolder


def conclude(monkeypatch: pytest.MonkeyPatch, run_dir: Path, owner_error: Exception) -> None:
    unused: Any = MagicMock()
    for name in ("run_result", "closing_text", "device_name"):
        monkeypatch.setattr(conclusion, name, unused)
    folder = RunFolder(run_dir, MagicMock(side_effect=owner_error))
    planned = MagicMock()
    planned.memory.estimated_peak_bytes.return_value = 0
    conclusion._conclude(MagicMock(folder=folder), planned, unused, unused)


def test_a_folder_that_is_gone_costs_the_result_alone(monkeypatch, tmp_path):
    gone = FileNotFoundError(2, "No such file or directory", str(tmp_path))
    with pytest.raises(UnsavedError, match=r"is finished, but its result is lost: .* No such file"):
        conclude(monkeypatch, tmp_path, gone)


def test_no_result_is_written_to_a_folder_of_another_job(monkeypatch, tmp_path):
    with pytest.raises(LostFolderError):
        conclude(monkeypatch, tmp_path, LostFolderError("another job has it"))
    assert list(tmp_path.iterdir()) == []
