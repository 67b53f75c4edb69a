"""TensorBoard's names for what runs are compared by; without torch, for those who only compare."""

from __future__ import annotations

from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.hparams.summary_v2 import HParam, Metric, hparams_config_pb

THROUGHPUT = "train/samples_per_s/median"
"""Of the whole run, as in result.json; `train/samples_per_s` is that of the last steps."""

HPARAMS = ("sharder", "batch_size", "seed")
COMPARED_METRICS = {
    "embedding/cost_ms": "embedding cost, ms",
    THROUGHPUT: "samples/s",
    "eval/auroc": "AUROC",
}
"""Titles of scalars. With the HParams, as many columns as TensorBoard's table shows on one page."""


def hparams_config() -> Summary:
    """Columns of the HParams table: the same from every run, as TensorBoard takes any one's."""
    return hparams_config_pb(
        hparams=[HParam(name) for name in HPARAMS],
        metrics=[Metric(tag, display_name=title) for tag, title in COMPARED_METRICS.items()],
    )
