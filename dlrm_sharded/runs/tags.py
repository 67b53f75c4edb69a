"""TensorBoard's tags for the figures that runs are compared by.

Other tags stand where they are written: `run_events.py`, `comparison_events.py` and
`training/trainer.py`.
"""

from __future__ import annotations

from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.hparams.summary_v2 import HParam, Metric, hparams_config_pb

THROUGHPUT = "train/samples_per_s/median"
"""Throughput of the whole run, as in result.json; `train/samples_per_s` is that of a few steps."""

HPARAMS = ("sharder", "batch_size", "seed")
COMPARED_METRICS = {
    "embedding/cost_ms": "embedding cost, ms",
    THROUGHPUT: "samples/s",
    "eval/auroc": "AUROC",
}
"""Titles of scalars by tag. With the HParams, these are the columns that fit on one page."""


def hparams_config() -> Summary:
    """Return the columns of the HParams table; TensorBoard takes them from any run."""
    return hparams_config_pb(
        hparams=[HParam(name) for name in HPARAMS],
        metrics=[Metric(tag, display_name=title) for tag, title in COMPARED_METRICS.items()],
    )
