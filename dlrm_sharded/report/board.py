"""The comparison as a run of its own in TensorBoard."""

from __future__ import annotations

import re
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

from dlrm_sharded.cost.types import STAGES
from dlrm_sharded.report.pictures import pictures
from dlrm_sharded.report.summary import Comparison
from dlrm_sharded.report.text import markdown
from dlrm_sharded.training.tensorboard import THROUGHPUT, hparams_config

SUFFIX = ".comparison"
"""Ends the names of event files that are ours to replace."""

CHARTS = {
    "embedding": (
        "embedding/cost_ms",
        "embedding/critical_path_ms",
        "embedding/input_dist_ms",
        "embedding/imbalance",
        *(f"embedding/{stage}_ms/max" for stage in STAGES),
    ),
    "planning and training": ("plan/solve_s", THROUGHPUT, "eval/auroc"),
}
"""Scalars of runs, each in a chart of all runs."""


def write_board(comparison: Comparison, folder: Path) -> None:
    """Replace the event file of an earlier comparison; others in the folder stay."""
    for old in folder.glob(f"events.out.tfevents.*{SUFFIX}"):
        old.unlink()
    # TensorBoard drops from the given step on what it has read of the file that was replaced.
    with SummaryWriter(str(folder), purge_step=0, filename_suffix=SUFFIX) as writer:
        writer.add_text("comparison/summary", markdown(comparison))
        for tag, figure in pictures(comparison).items():
            writer.add_figure(tag, figure)
        writer.add_custom_scalars(
            {
                category: {tag: ["Multiline", [f"^{re.escape(tag)}$"]] for tag in tags}
                for category, tags in CHARTS.items()
            }
        )
        writer._get_file_writer().add_summary(hparams_config())
