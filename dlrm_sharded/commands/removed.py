"""Keys and options that an earlier release had, and what to use instead."""

from __future__ import annotations

from pathlib import Path

from dlrm_sharded.commands.yamls import option_node

IN_RANKS = "all tables are in the ranks' memory; use more ranks, or sharder.table_precision=fp16"
MINUTES = "minutes decides how many plans are measured; leave it out"
OF_DEVICE = "plans have a size for the device; leave it out"

REMOVED: dict[str, str] = {
    "data=dlrm_v3_streaming": "plan tables of sequences in a TorchRec model, with plan_model",
    "dedup": "plans do not count on deduplicated ids of sequences; leave it out",
    "sharder.objective": "plans minimize the embedding cost; leave it out",
    "data=yambda_5b": "plan tables of sequences in a TorchRec model, with plan_model",
    "model": "plans do not depend on the model's layers; leave it out",
    "collect.batch_sizes": "use batch_sizes=[...]",
    "collect.optimizer": "use optimizer=OPTION",
    "collect.seed": "use seed=SEED",
    "collect.time_budget_s": "use minutes=MINUTES",
    **dict.fromkeys(("collect.ids_per_step", "collect.table_gib"), OF_DEVICE),
    **dict.fromkeys(("collect.measure", "collect.num_repeats", "collect.num_samples"), MINUTES),
    **dict.fromkeys(("collect.repeat_every", "collect.task"), MINUTES),
    "fit": "a calibration fits what it has measured; leave it out",
    "fit.from_prior": "a model is always fitted from a prior; leave it out",
    "fit.holdout_share": "each plan is left out of one of several fits; leave it out",
    "fit.model": "use architecture=NAME",
    "fit.num_steps": "use num_steps=NUMBER",
    "fit.seed": "use seed=SEED",
    "sharder=neuroshard_paper": "use sharder=neuroshard",
    "cost_model=neuroshard_paper": "use cost_model=neuroshard",
    "sharder=hugectr": "use sharder=search",
    "sharder=embark": "use sharder=search",
    "sharder=torchrec_blind": "use sharder=torchrec",
    "sharder=torchrec_dp": "use sharder=torchrec with sharder.full=true",
    "sharder=torchrec_calibrated": "use sharder=torchrec, or sharder=search",
    "sharder=autoshard_portfolio": "use sharder=autoshard, or sharder=search",
    "sharder=dreamshard_portfolio": "use sharder=dreamshard, or sharder=search",
    "sharder.portfolio": "leave it out, or use sharder=search",
    "sharder.informed": "leave it out",
    "sharder.cache_tables": IN_RANKS,
    "topology.host_memory_gib": IN_RANKS,
    "topology.host_gb_per_s": IN_RANKS,
    "curve_batches": IN_RANKS,
}
"""Maps `group=option` or a key, with all keys below a dotted one, to what users can set instead."""


def why_removed(name: str) -> str | None:
    """Return the message for a key or option of an earlier release; None for any other name.

    Args:
        name: a dotted key, such as `sharder.objective`, or an option, such as `sharder=hugectr`.
    """
    for removed, instead in REMOVED.items():
        if name == removed or ("." in removed and name.startswith(f"{removed}.")):
            return f"{name} is not there since 0.3: {instead}"
    return None


def why_key_of_search(name: str) -> str | None:
    """Return the message for a key of `sharder=search` that another sharder is given."""
    group, _, key = name.partition(".")
    key = key.partition(".")[0]
    if group != "sharder" or key.startswith("_") or key not in option_node("sharder", "search"):
        return None
    return f"{name} is a key of sharder=search, which 0.2 called neuroshard; use sharder=search"


def why_option_removed(file: Path) -> str | None:
    """Return the message for an option's file, such as sharder/hugectr, as `why_removed` does."""
    return why_removed(f"{file.parent}={file.stem}")
