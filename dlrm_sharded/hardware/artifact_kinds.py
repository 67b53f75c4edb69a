"""The kinds of artifacts, and what messages say about them."""

from __future__ import annotations

from dataclasses import dataclass

CALIBRATE = "`dlrm-calibrate`"

RETUNE = "init_from=packaged costs=predicted schedule.num_rounds=3"
"""Overrides of `dlrm-train-policy` that adapt the packaged policy to the run's cost model."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of artifact, and the texts of messages about it.

    Args:
        name: prefix of the names of its files.
        noun: what users call such an artifact.
        made_with: command that makes one.
        other_device, other_hardware: consequence for a run on another device or other hardware
            than the artifact's, for which it is a prior, and what to do.
        other_optimizer: the same for another optimizer; {optimizer} stands for the run's.
        required: further keys that the header must have.
    """

    name: str
    noun: str
    made_with: str
    other_device: str = ""
    other_hardware: str = ""
    other_optimizer: str = ""
    required: tuple[str, ...] = ()


def cost_model_kind(name: str) -> Kind:
    """Return the kind of cost models of this name."""
    calibrate = f"run {CALIBRATE} (2 minutes) for a model of this hardware"
    return Kind(
        name,
        noun="cost model",
        made_with=CALIBRATE,
        other_device="its computation says nothing about this device, and its exchanges follow "
        f"from stated bandwidths; {calibrate}, or plan with sharder=torchrec",
        other_hardware="until plans are measured here, its times may be wrong by a factor, and "
        f"its order of plans is less reliable; {CALIBRATE} (2 minutes) measures most",
        other_optimizer="backward computation may be wrong; run "
        "`dlrm-calibrate optimizer.embedding={optimizer}`",
        required=("ranges", "measured_links"),
    )


def other_device_caveat(hardware: str, device: str, used_on: str) -> str | None:
    """Return a caveat for a cost model that is used on ranks of another device type, else None.

    Args:
        hardware, device: name and device type of the model's hardware.
        used_on: device type of the ranks.
    """
    if device == used_on:
        return None
    return (
        f"the predicted times are those of another device ({hardware}, {device}) than the ranks' "
        f"({used_on}), so they do not show which plan is better; run {CALIBRATE} on these ranks, "
        "or plan with sharder=torchrec"
    )


def policy_kind(name: str) -> Kind:
    """Return the kind of policies that the method of this name trains."""
    command = f"dlrm-train-policy policy={name}"
    elsewhere = (
        "it balances the costs of that hardware, so plans may be less balanced; after a "
        f"calibration, `{command} {RETUNE}` re-tunes it in about a minute"
    )
    return Kind(
        name,
        noun="policy",
        made_with=f"`{command}`",
        other_device=elsewhere,
        other_hardware=elsewhere,
        other_optimizer="it balances the backward computation of that optimizer, so plans may be "
        f"less balanced; run `{command} optimizer.embedding={{optimizer}}`",
    )
