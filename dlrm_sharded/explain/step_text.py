"""Texts on whole steps: what they take, what their time goes to, and who waits for whom."""

from __future__ import annotations

from dlrm_sharded.plans.standing import within_text
from dlrm_sharded.step.breakdown import Breakdown
from dlrm_sharded.step.parts import PART_LABELS
from dlrm_sharded.step.prediction import StepPrediction

LEAST_SHARE = 0.005
"""Share of the step below which a part is not named."""


def step_text(prediction: StepPrediction) -> str:
    """Write the predicted step and its parts in one line."""
    needs = needs_text(prediction)
    return (
        f"predicted step {prediction.step_ms:.1f} ms, {prediction.samples_per_s:,.0f} samples/s"
        f"{error_bar(prediction)}: {parts_text(prediction.breakdown)}"
        f"{'' if needs is None else f'; {needs}'}"
    )


def error_bar(prediction: StepPrediction) -> str:
    """Write how far a prediction may be off, to be appended to a text; nothing if not known."""
    if prediction.error is None:
        return ""
    return f", {within_text(prediction.error)}"


def needs_text(prediction: StepPrediction) -> str | None:
    """Say what the GPUs and their hosts need for a step, and which bounds it; None on CPUs."""
    host = prediction.host
    if host is None:
        return None
    bound = "bound by the host" if prediction.bounding_host else "bound by the GPUs"
    return (
        f"{bound}: the GPUs need {prediction.device_ms:.1f} ms for a step, the host "
        f"{host.ms:.1f} ms ({host.source}, {within_text(host.error)})"
    )


def parts_text(breakdown: Breakdown) -> str:
    """Write the parts of a step, averaged over its ranks, without the smallest ones.

    An exchange that is hidden behind computation, in part or as a whole, is named with that time.
    """
    least_ms, hidden_ms = LEAST_SHARE * breakdown.step_ms, breakdown.mean_hidden_ms
    texts = []
    for part, ms in breakdown.mean_parts_ms.items():
        hidden = hidden_ms.get(part, 0.0)
        if max(ms, hidden) > least_ms:
            more = f" (and {hidden:.1f} hidden)" if hidden > least_ms else ""
            texts.append(f"{PART_LABELS[part]} {ms:.1f}{more}")
    return ", ".join(texts)
