"""Ranks that are started by hand, as on several hosts, with configs that differ."""

import socket

import pytest

from tests import preloaded
from tests.conftest import SMALL_RUN
from tests.e2e.runs import kinds_of_files
from tests.preloaded.ranks import environments

pytestmark = pytest.mark.slow


def test_a_difference_is_named_with_its_hosts(tmp_path):
    """They trained together in silence, to an AUROC that meant nothing."""
    key, values = "optimizer.dense_learning_rate", ["0.01", "0.5"]
    run = ("-m", "dlrm_sharded.train", f"hydra.run.dir={tmp_path}/run", *SMALL_RUN, "sharder=dim")
    ranks = [
        preloaded.start(*run, f"{key}={value}", env=of_rank)
        for of_rank, value in zip(environments(2, 1), values, strict=True)
    ]
    outputs = [rank.communicate()[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [2, 2], outputs
    said, silent = outputs
    host = socket.gethostname()
    assert silent == ""
    (line,) = [line for line in said.splitlines() if "not started alike" in line]
    assert f"{key} is " in line
    assert f"on rank 0 ({host}) and " in line
    assert f"on rank 1 ({host})" in line
    assert "Traceback" not in said
    assert "result" not in kinds_of_files(tmp_path)
