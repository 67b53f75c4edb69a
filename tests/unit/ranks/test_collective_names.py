"""Collectives are named by the frames of a traceback."""

import pytest

from dlrm_sharded.ranks.collective_names import GRADIENTS, collective_name, name_of_frames

C10D = "/x/torch/distributed/distributed_c10d.py"
LOGGER = "/x/torch/distributed/c10d_logger.py"
COMM_OPS = "/x/torchrec/distributed/comm_ops.py"
DIST_DATA = "/x/torchrec/distributed/dist_data.py"
TRAINER = ("/home/me/dlrm_sharded/training/trainer.py", "Trainer._step")


NAMES = {
    "the all-to-all of pooled embeddings": [
        ("/x/torchrec/distributed/types.py", "wait"),
        (COMM_OPS, "All2All_Pooled_Wait.forward"),
    ],
    "the all-to-all of pooled embeddings in the backward pass": [
        ("/x/torch/autograd/graph.py", "_engine_run_backward"),
        (COMM_OPS, "All2All_Pooled_Req.backward"),
    ],
    "the all-to-all of embeddings": [(COMM_OPS, "All2All_Seq_Req_Wait.forward")],
    "the all-to-all of the numbers of ids": [
        (DIST_DATA, "SplitsAllToAllAwaitable.__init__"),
        *((LOGGER, "_wrapper"), (C10D, "all_to_all_single")),
    ],
    "all_gather_object in all_or_none": [
        ("/home/me/distributed.py", "all_or_none"),
        *((LOGGER, "w"), (C10D, "all_gather_object"), (LOGGER, "w"), (C10D, "all_gather")),
    ],
    "barrier in _step": [(LOGGER, "w"), (C10D, "barrier")],
    GRADIENTS: [
        ("/x/torch/_tensor.py", "Tensor.backward"),
        ("/x/torch/autograd/graph.py", "_engine_run_backward"),
    ],
    None: [],
}
"""What is named by the frames that follow those of a trainer."""


@pytest.mark.parametrize(("name", "frames"), NAMES.items(), ids=str)
def test_names(name, frames):
    assert name_of_frames([TRAINER, *frames]) == name


def test_no_frames():
    assert name_of_frames([]) is None


def test_an_error_without_a_traceback():
    assert collective_name(RuntimeError("timed out")) == "a collective"
