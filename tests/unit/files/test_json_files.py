"""JSON files are complete, or what they were before."""

import math

import pytest

from dlrm_sharded.files.json_files import read_json_object, write_json


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_json_does_not_have_is_not_written(value, tmp_path):
    write_json(tmp_path / "a.json", {"a": 1.0})
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(tmp_path / "a.json", {"a": [value]})
    assert read_json_object(tmp_path / "a.json", noun="test") == {"a": 1.0}
    assert len(list(tmp_path.iterdir())) == 1
