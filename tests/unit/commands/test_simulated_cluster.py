"""The config of a simulation decides how the dense part is priced."""

from unittest.mock import MagicMock

import pytest

from dlrm_sharded.commands.step_model import build_dense
from tests.unit.commands.conftest import composed_config


@pytest.mark.parametrize(("mode", "compiled"), [("default", True), ("null", False)])
def test_compiled_layers_take_less_of_the_host(mode, compiled):
    cfg = composed_config("simulate", f"model.compile_mode={mode}")
    assert build_dense(cfg, 13, MagicMock()).compiled == compiled
