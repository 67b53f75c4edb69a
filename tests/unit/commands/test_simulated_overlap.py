"""`overlap=` of a simulation takes the names of pipelines, on GPUs and on CPUs."""

import pytest

from dlrm_sharded.commands.step_model import overlap_of
from dlrm_sharded.files.errors import ConfigError
from dlrm_sharded.step.pipelines import PIPELINES
from dlrm_sharded.step.schedule import PIPELINED, SERIAL


@pytest.mark.parametrize(("device", "usual"), [("cuda", PIPELINED), ("cpu", SERIAL)])
def test_a_pipeline_overlaps_what_the_device_can(device, usual):
    assert overlap_of("auto", device) == usual
    assert overlap_of("sparse_dist" if device == "cuda" else "base", device) == usual
    for name, pipeline in PIPELINES.items():
        found = overlap_of(name, device)
        assert (found.exchanges, found.reads_ahead) == (usual.exchanges, usual.reads_ahead)
        assert (found.next_ids, found.next_lookup) == (pipeline.next_ids, pipeline.next_lookup)


def test_an_unknown_overlap_is_refused_with_those_that_there_are():
    with pytest.raises(ConfigError, match=r"known: auto, serial, pipelined, base, .*prefetch"):
        overlap_of("some", "cuda")
