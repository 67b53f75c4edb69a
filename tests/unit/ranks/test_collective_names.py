"""Collectives are named by the frames of a traceback."""

import pytest

from dlrm_sharded.ranks.collective_names import GRADIENTS, collective_name, name_of_frames

C10D = "/x/torch/distributed/distributed_c10d.py"
LOGGER = "/x/torch/distributed/c10d_logger.py"
COMM_OPS = "/x/torchrec/distributed/comm_ops.py"
DIST_DATA = "/x/torchrec/distributed/dist_data.py"
TRAINER = ("/home/me/dlrm_sharded/training/trainer.py", "Trainer._step")


@pytest.mark.parametrize(
    ("frames", "name"),
    [
        (
            [
                TRAINER,
                ("/x/torchrec/distributed/types.py", "wait"),
                (COMM_OPS, "All2All_Pooled_Wait.forward"),
            ],
            "the all-to-all of pooled embeddings",
        ),
        (
            [
                TRAINER,
                ("/x/torch/autograd/graph.py", "_engine_run_backward"),
                (COMM_OPS, "All2All_Pooled_Req.backward"),
            ],
            "the all-to-all of pooled embeddings in the backward pass",
        ),
        ([TRAINER, (COMM_OPS, "All2All_Seq_Req_Wait.forward")], "the all-to-all of embeddings"),
        (
            [
                TRAINER,
                (DIST_DATA, "SplitsAllToAllAwaitable.__init__"),
                (LOGGER, "_wrapper"),
                (C10D, "all_to_all_single"),
            ],
            "the all-to-all of the numbers of ids",
        ),
        (
            [
                TRAINER,
                ("/home/me/distributed.py", "all_or_none"),
                (LOGGER, "w"),
                (C10D, "all_gather_object"),
                (LOGGER, "w"),
                (C10D, "all_gather"),
            ],
            "all_gather_object in all_or_none",
        ),
        ([TRAINER, (LOGGER, "w"), (C10D, "barrier")], "barrier in _step"),
        (
            [
                TRAINER,
                ("/x/torch/_tensor.py", "Tensor.backward"),
                ("/x/torch/autograd/graph.py", "_engine_run_backward"),
            ],
            GRADIENTS,
        ),
        ([TRAINER], None),
        ([], None),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_names(frames: list[tuple[str, str]], name: str | None) -> None:
    assert name_of_frames(frames) == name


def test_an_error_without_a_traceback() -> None:
    assert collective_name(RuntimeError("timed out")) == "a collective"
