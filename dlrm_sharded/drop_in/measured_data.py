"""Measures the accesses to a model's tables on batches of its data."""

from __future__ import annotations

import logging
import reprlib
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_sharded.datasets.base import reuse_histogram
from dlrm_sharded.datasets.id_check import find_faults
from dlrm_sharded.drop_in.module_tables import ModuleTables
from dlrm_sharded.files.errors import DataError
from dlrm_sharded.files.progress_bar import ProgressBar
from dlrm_sharded.plans.task import ShardingTask

log = logging.getLogger(__name__)

KjtsOf = Callable[[Any], Any]
"""Returns the KeyedJaggedTensors in a batch: one, any collection or object with some, or a mapping
from the paths of modules to those that they look up."""

EXPECTED = (
    "give a KeyedJaggedTensor, a batch with some in it, or a list or loader of these; kjts_of can "
    "return those of a batch"
)
"""Messages end with this, because `data` may be any of these."""

MAX_DEPTH = 4
"""Depth of nested containers in which the KeyedJaggedTensors of a batch are looked for."""


def with_measured_accesses(
    task: ShardingTask,
    modules: Sequence[ModuleTables],
    data: Any,
    *,
    kjts_of: KjtsOf | None = None,
    max_batches: int | None = None,
) -> ShardingTask:
    """Return a task with the pooling factors and reuse histograms of some batches.

    It reads batches until they have the samples of a global batch, because the more samples there
    are, the more often ids repeat.

    Args:
        modules: modules that have the task's tables.
        data: batches, or one batch.
        kjts_of: returns the KeyedJaggedTensors of a batch; None to look for them in the batch.
        max_batches: limit on the number of batches.

    Raises:
        DataError: no KeyedJaggedTensor is found, there are no samples, a feature is in several
            KeyedJaggedTensors, or ids are below 0 or contradict the lengths.
    """
    started_s = time.perf_counter()
    ids: dict[str, list[Tensor]] = defaultdict(list)
    warnings: dict[str, str] = {}
    num_samples = num_batches = 0
    with ProgressBar(total=task.batch_size, desc="measuring accesses", unit="samples") as bar:
        for where, kjts in _kjts_of_batches(data, modules, kjts_of):
            for module, own in zip(modules, kjts, strict=True):
                _check_ids(module, own, where, warnings)
                for name, table in module.tables.items():
                    for feature in module.features.get(name, ()):
                        ids[table.name] += _values(own, feature, module)
            size = max(kjt.stride() for found in kjts for kjt in found)
            num_samples, num_batches = num_samples + size, num_batches + 1
            bar.update(size)
            if num_samples >= task.batch_size or num_batches == max_batches:
                break
    if num_samples == 0:
        raise DataError(
            f"data has {num_batches} batches and no sample in them ({reprlib.repr(data)}); "
            f"{EXPECTED}"
        )
    found = {name: torch.cat(values) for name, values in ids.items() if values}
    log.info(
        "measured the accesses to %d of %d tables in %d batches (%d samples) in %.1f s",
        len(found),
        len(task.tables),
        num_batches,
        num_samples,
        time.perf_counter() - started_s,
    )
    for text in warnings.values():
        log.warning("%s; a training looks up other rows", text)
    _warn_of_what_is_missing(task, num_samples, found)
    return task.with_values(
        pooling_factor={name: values.numel() / num_samples for name, values in found.items()},
        reuse_histogram={name: reuse_histogram(values) for name, values in found.items()},
    )


def _warn_of_what_is_missing(task: ShardingTask, num_samples: int, found: Collection[str]) -> None:
    """Warn of fewer samples than a global batch has, and of tables that were not found."""
    if num_samples < task.batch_size:
        log.warning(
            "data has %d samples, and a global batch %d, in which ids repeat more often; give more "
            "batches (data, max_batches)",
            num_samples,
            task.batch_size,
        )
    if missing := [table.name for table in task.tables if table.name not in found]:
        log.warning("data has no feature of %s; their accesses are assumed", ", ".join(missing))


def _kjts_of_batches(
    data: Any, modules: Sequence[ModuleTables], kjts_of: KjtsOf | None
) -> Iterator[tuple[str, list[list[KeyedJaggedTensor]]]]:
    """Yield how messages name a batch, and the KeyedJaggedTensors that each module may look up."""
    for number, batch in enumerate(_batches(data)):
        where = "data" if batch is data else f"batch {number} of data"
        value = batch if kjts_of is None else kjts_of(batch)
        if isinstance(value, Mapping) and {module.path for module in modules} & value.keys():
            kjts = [list(find_kjts(value.get(module.path))) for module in modules]
        else:
            kjts = [list(find_kjts(value))] * len(modules)
        if not any(kjts):
            raise DataError(
                f"{where} is {reprlib.repr(batch)}, in which no KeyedJaggedTensor is found; "
                f"{EXPECTED}"
            )
        yield where, kjts


def _check_ids(
    module: ModuleTables, kjts: Sequence[KeyedJaggedTensor], where: str, warnings: dict[str, str]
) -> None:
    """Add a warning for each table that lacks rows for ids of a batch, unless ids are remapped.

    Raises:
        DataError: ids are below 0, or contradict the lengths.
    """
    tables = {key: module.tables[name] for name, of in module.features.items() for key in of}
    for kjt in () if module.remaps_ids else kjts:
        for fault in find_faults(kjt, tables):
            text = f"{fault.text}, in {where}"
            if fault.table is None or fault.is_fatal:
                raise DataError(f"{text}; fix the data")
            warnings.setdefault(fault.table, text)


def find_kjts(value: Any, depth: int = MAX_DEPTH) -> Iterator[KeyedJaggedTensor]:
    """Yield the KeyedJaggedTensors in a batch: in collections, dataclasses and attributes."""
    if isinstance(value, KeyedJaggedTensor):
        yield value
        return
    items: Iterable[Any] = ()
    if isinstance(value, Mapping):
        items = value.values()
    elif isinstance(value, list | tuple):
        items = value
    elif hasattr(value, "__dict__") and not isinstance(value, Tensor | torch.nn.Module | type):
        items = vars(value).values()
    for item in items if depth else ():
        yield from find_kjts(item, depth - 1)


def _batches(data: Any) -> Iterable[Any]:
    """Return the batches of `data`, which may be one of them.

    A list is one batch if it has a tensor, or several KeyedJaggedTensors of different features.
    """
    has_batches = hasattr(data, "__iter__") or hasattr(data, "__getitem__")
    if not has_batches or isinstance(data, str | Tensor | KeyedJaggedTensor | Mapping):
        return [data]
    parts = data if isinstance(data, list | tuple) else []
    keys = [set(part.keys()) for part in parts if isinstance(part, KeyedJaggedTensor)]
    differ = len(keys) > 1 and len(set().union(*keys)) == sum(map(len, keys))
    is_batch = differ or any(isinstance(part, Tensor) for part in parts)
    return [data] if is_batch else cast(Iterable[Any], data)


def _values(kjts: Sequence[KeyedJaggedTensor], feature: str, module: ModuleTables) -> list[Tensor]:
    """Return the ids of a feature from the one KeyedJaggedTensor that has it; [] if none has."""
    having = [kjt for kjt in kjts if feature in set(kjt.keys())]
    if len(having) > 1:
        is_weighted = bool(module.is_weighted)
        having = [kjt for kjt in having if (kjt.weights_or_none() is not None) == is_weighted]
    if len(having) > 1:
        raise DataError(
            f"feature {feature!r} of {module.title} is in {len(having)} KeyedJaggedTensors of a "
            f"batch; let kjts_of return {{{module.path!r}: ...}} with that of the module"
        )
    return [kjt[feature].values().detach().cpu() for kjt in having]
