"""Loads what a run goes on from."""

from __future__ import annotations

from dlrm_sharded.checkpoint.restore import load_model, load_weights
from dlrm_sharded.job.build import Built
from dlrm_sharded.job.plan import Planned, begin
from dlrm_sharded.job.prepare import Prepared
from dlrm_sharded.model.fused_lookups import set_fused_steps
from dlrm_sharded.ranks.agreement import all_or_none, on_rank_zero
from dlrm_sharded.training.progress import Progress, read_progress


def resume(prepared: Prepared, planned: Planned, built: Built) -> Progress:
    """Load the checkpoint or the weights that a run begins from; return where it goes on.

    Nothing of a former run has changed before its checkpoint is read.
    """
    start = prepared.start
    if start.weights is not None:
        load_weights(start.weights, built.state)
    if start.resumed is None:
        return Progress()
    load_model(start.resumed, built.state)
    set_fused_steps(built.model, start.step)
    with all_or_none():
        progress = read_progress(start.resumed, prepared.rank, same_plan=not planned.is_new)
    on_rank_zero(lambda: begin(prepared, planned))
    return progress
