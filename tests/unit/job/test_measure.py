"""A run says truthfully whether the journal has its measurement."""

import logging

import pytest

from dlrm_sharded.calibration.disturbance import Disturbance
from dlrm_sharded.calibration.sample_store import SampleStore, sample_of_run
from dlrm_sharded.hardware.context import RunContext
from dlrm_sharded.job.measure_run import note_run
from tests.unit.calibration.test_sample_store import COST, PLAN, TASK

CONTEXT = RunContext("cpu", optimizer="sgd", ranks_per_host=2)
RUN = sample_of_run(PLAN, TASK, COST)


@pytest.mark.parametrize("is_file", [False, True], ids=["a_folder", "a_file"])
def test_says_whether_the_run_is_noted(tmp_path, caplog, is_file):
    cache = tmp_path / "cache"
    if is_file:
        cache.write_text("a file is in the way")
    journal = SampleStore(cache / "runs" / "hardware.jsonl")
    with caplog.at_level(logging.INFO):
        note_run(journal, CONTEXT, RUN, Disturbance())
    [said] = caplog.messages
    assert said.startswith("the sample is not noted in" if is_file else "noted in")


@pytest.mark.parametrize("is_busy", [False, True], ids=["idle", "busy"])
def test_says_that_a_disturbed_run_counts_less(tmp_path, caplog, is_busy):
    journal = SampleStore(tmp_path / "hardware.jsonl")
    beside = Disturbance(core_wait=0.4 if is_busy else 0.01)
    with caplog.at_level(logging.WARNING):
        note_run(journal, CONTEXT, RUN, beside)
    assert [message for message in caplog.messages if "for 40 % of the time" in message] == (
        caplog.messages if is_busy else []
    )
    assert len(caplog.messages) == is_busy
