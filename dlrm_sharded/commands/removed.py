"""Keys and options that an earlier release had, and what to use instead."""

from __future__ import annotations

from dlrm_sharded.commands.yamls import option_node

IN_RANKS = "all tables are in the ranks' memory; use more ranks, or sharder.table_precision=fp16"

REMOVED: dict[str, str] = {
    "data=dlrm_v3_streaming": "plan tables of sequences in a TorchRec model, with plan_model",
    "data.source.": "name data.files, data.validation_files, data.val_share and data.schema",
    "dedup": "plans do not count on deduplicated ids of sequences; leave it out",
    "sharder.objective": "plans minimize the embedding cost; leave it out",
    "data=yambda_5b": "plan tables of sequences in a TorchRec model, with plan_model",
    "model": "plans do not depend on the model's layers; leave it out",
    "collect.": "minutes decides how many plans are measured; batch_sizes, seed and optimizer stay",
    "fit.": "one fit of all that was measured; architecture, num_steps and seed stay",
    "policies": "run dlrm-train-policy, as a calibration says at its end",
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
"""It says what users can set instead of a `group=option`, or of a key and all keys below it."""


def why_removed(name: str) -> str | None:
    """Return the message for a key or option of an earlier release; None for any other name.

    Keys of `sharder=search` that are used with another sharder get a message, too.

    Args:
        name: an unknown dotted key, such as `sharder.objective`, or an unknown option, such as
            `sharder=hugectr`.
    """
    for removed, instead in REMOVED.items():
        prefix = f"{removed.rstrip('.')}."
        if name == removed or ("." in removed and name.startswith(prefix)):
            return f"{name} was removed in 0.3: {instead}"
    group, key, below = (*name.split(".", 2), "", "")[:3]
    if group == "sharder" and key[:1] != "_" and key in option_node("sharder", "search"):
        use = f"use sharder=search, or in dlrm-compare 'sharders=[search;{key}=...]'"
        use = f"write 'sharder.{key}={{{below}: ...}}'" if below else use
        return f"sharder.{key} is a key of sharder=search; {use}"
    return None
