"""Says which keys of a config decide what is trained.

They must be the same on all ranks of a job, and in a resumed run the same as in its checkpoint.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dlrm_sharded.datasets.base import SPLITS, Dataset
from dlrm_sharded.files.provenance import versions
from dlrm_sharded.ranks.agreement import shown

DECIDES = ("batch_size", "seed", "data", "model", "optimizer.embedding", "optimizer.dense")
"""Keys, with all keys below them, that decide the samples, their order, and the model."""

MAY_CHANGE = (
    *("optimizer", "exchange_precision", "trainer.tf32", "model.bf16", "model.compile_mode"),
    *("model.dense_graph", "trainer.pipeline"),
    *("data.num_val_batches", "data.val_half"),
)
"""Keys, with all keys below them, that decide how a resumed run trains, or its validation data. A
run may continue with other values, such as a lower learning rate, and logs that."""

DECIDES_NOTHING = ("data.pregenerate", "data.cache_batches", "data.cache_gib", "data.bounds")
"""Keys below those of `DECIDES` that only say how batches are kept and checked."""

PATHS = ("path", "files", "validation_files", "schema", "blocks_dir")
"""Last parts of keys that name places of data, which may move or differ between hosts."""

OF_A_HOST = ("journal", "topology.memory_gib", "topology.memory_fraction", "topology.reserved_gib")
"""Keys that may differ between hosts: only rank 0 reads the journal, and each rank has its own
memory."""


def flat(value: Any, key: str = "") -> dict[str, Any]:
    """Return the values of a config by dotted key; lists of numbers or strings stay lists."""
    if isinstance(value, Mapping):
        items = [(str(name), item) for name, item in value.items()]
    elif isinstance(value, list) and any(isinstance(item, Mapping | list) for item in value):
        items = [(str(number), item) for number, item in enumerate(value)]
    else:
        return {key: value}
    found: dict[str, Any] = {}
    for name, item in items:
        found |= flat(item, f"{key}.{name}" if key else name)
    return found


def must_match_at_start(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what must be the same on all ranks when a job starts: config, versions and code.

    Args:
        config: values by dotted key.
    """
    decided = {
        key: value
        for key, value in config.items()
        if not _is_below(key, OF_A_HOST) and not (_is_below(key, ("data",)) and _is_path(key))
    }
    installed = {f"version of {package}": found for package, found in versions().items()}
    return decided | installed | {"code of dlrm_sharded": _code_digest()}


def must_match_in_data(dataset: Dataset) -> dict[str, Any]:
    """Return what must be the same in all ranks' data, which each host may have on its own disk."""
    values: dict[str, Any] = {
        f"number of {split} batches": dataset.num_batches(split) for split in SPLITS
    }
    for table in dataset.tables:
        size = [table.num_embeddings, table.embedding_dim]
        values[f"size of table {table.name}"] = [*size, *table.features]
        profile = (table.pooling_factor, *(table.reuse_histogram or ()))
        # on different processors, means and shares may differ in their last digits
        values[f"profile of table {table.name}"] = [float(f"{value:.6g}") for value in profile]
    return values


def refused_and_changed(
    written: Mapping[str, Any], config: Mapping[str, Any]
) -> tuple[list[str], list[str]]:
    """Return how a config differs from a checkpoint's config.

    Returns:
        The differences that prevent a run from continuing, and those that do not.
    """
    before, now = flat(written), flat(config)
    refused: list[str] = []
    changed: list[str] = []
    for key in sorted(before.keys() | now.keys()):
        if not _is_below(key, (*DECIDES, *MAY_CHANGE)) or _is_below(key, DECIDES_NOTHING):
            continue
        if before.get(key) == now.get(key):  # a key that only one of them has may be null there
            continue
        text = f"{key} is {shown(now, key)} and was {shown(before, key)}"
        # keys that a version adds or renames are no reason to refuse checkpoints
        is_in_both = key in before and key in now
        may_change = _is_path(key) or (_is_below(key, MAY_CHANGE) and key not in DECIDES)
        (changed if may_change or not is_in_both else refused).append(text)
    return refused, changed


def _is_below(key: str, groups: tuple[str, ...]) -> bool:
    return any(f"{key}.".startswith(f"{group}.") for group in groups)


def _is_path(key: str) -> bool:
    return key.rpartition(".")[2] in PATHS


def _code_digest() -> str:
    """Return a digest of this package's modules: checkouts of one version may differ."""
    package = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(str(path.relative_to(package)).encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]
