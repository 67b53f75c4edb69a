"""Measures the accesses to a model's tables on batches of its data."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_sharded.datasets.base import profiled_table
from dlrm_sharded.datasets.id_check import find_faults
from dlrm_sharded.drop_in.module_tables import ModuleTables
from dlrm_sharded.files.errors import DataError
from dlrm_sharded.files.progress_bar import ProgressBar

log = logging.getLogger(__name__)

KjtsOf = Callable[[Any], Any]
"""Returns the KeyedJaggedTensors in a batch: one, any collection or object with some, or a mapping
from the paths of modules to those that they look up."""

EXPECTED = (
    "give a KeyedJaggedTensor, a batch with some in it, or a list or loader of these; kjts_of can "
    "return those of a batch"
)
"""Messages end with this, because `data` may be any of these."""

NO_BATCH = (type(None), int, float, str, bytes, Tensor)
"""Types in which no KeyedJaggedTensor is."""

MAX_DEPTH = 4
"""Containers within each other in which the KeyedJaggedTensors of a batch are searched."""


def measured(
    modules: Sequence[ModuleTables],
    data: Any,
    batch_size: int,
    *,
    kjts_of: KjtsOf | None = None,
    max_batches: int | None = None,
) -> list[ModuleTables]:
    """Return the modules with the pooling factors and reuse histograms of some batches.

    It reads as many as have the samples of a global batch, whose accesses repeat each other.

    Args:
        data: batches, or one batch.
        batch_size: samples of a global batch.
        kjts_of: the batch itself is searched if it is None.
        max_batches: limit on the number of batches.

    Raises:
        DataError: `data` is neither, there are no samples, or a feature is in several
            KeyedJaggedTensors, or ids are below 0 or contradict the lengths.
    """
    started_s = time.perf_counter()
    ids: dict[str, list[Tensor]] = defaultdict(list)
    beyond: dict[str, tuple[str, int]] = {}
    num_samples = num_batches = 0
    with ProgressBar(total=batch_size, desc="measuring accesses", unit="samples") as bar:
        for batch in _batches(data):
            find = None if isinstance(batch, NO_BATCH) else kjts_of
            kjts = _by_module(batch if find is None else find(batch), modules)
            sizes = [kjt.stride() for found in kjts for kjt in found]
            if not sizes:
                where = "data" if batch is data else f"batch {num_batches} of data"
                none = "no" if find is None else "kjts_of finds no"
                raise DataError(
                    f"{where} is {_text(batch)}, in which {none} KeyedJaggedTensor is; {EXPECTED}"
                )
            for module, own in zip(modules, kjts, strict=True):
                for lacking, text, count in _ids_beyond(module, own, num_batches):
                    first, before = beyond.get(lacking, (text, 0))
                    beyond[lacking] = first, before + count
                for name, table in module.tables.items():
                    for feature in module.features.get(name, ()):
                        if values := _values(own, feature, module):
                            ids[table.name] += values
            num_samples, num_batches = num_samples + max(sizes), num_batches + 1
            bar.update(max(sizes))
            if num_samples >= batch_size or num_batches == max_batches:
                break
    if num_samples == 0:
        raise DataError(
            f"data has {num_batches} batches and no sample in them ({_text(data)}); {EXPECTED}"
        )
    names = [table.name for module in modules for table in module.tables.values()]
    log.info(
        "measured the accesses to %d of %d tables in %d batches (%d samples) in %.1f s",
        len(ids),
        len(names),
        num_batches,
        num_samples,
        time.perf_counter() - started_s,
    )
    for first, count in beyond.values():
        log.warning("%s (%d in all); a training looks up other rows", first, count)
    if num_samples < batch_size:
        log.warning(
            "data has %d samples, and a global batch %d, in which ids repeat more often; give more "
            "batches (data, max_batches)",
            num_samples,
            batch_size,
        )
    if missing := [name for name in names if name not in ids]:
        log.warning("data has no feature of %s; their accesses are assumed", ", ".join(missing))
    return [_with_profiles(module, ids, num_samples) for module in modules]


def _ids_beyond(
    module: ModuleTables, kjts: Sequence[KeyedJaggedTensor], batch: int
) -> Iterator[tuple[str, str, int]]:
    """Yield tables that lack ids of a batch, a sentence, and their number, unless ids are remapped.

    Raises:
        DataError: ids are below 0, or contradict the lengths.
    """
    tables = {key: module.tables[name] for name, of in module.features.items() for key in of}
    for kjt in () if module.remaps_ids else kjts:
        for fault in find_faults(kjt, tables):
            text = f"{fault.text}, in batch {batch} of data"
            if fault.table is None or fault.is_fatal:
                raise DataError(f"{text}; fix the data")
            yield fault.table, text, fault.count


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
    if not has_batches or isinstance(data, (*NO_BATCH, KeyedJaggedTensor, Mapping)):
        return [data]
    parts = data if isinstance(data, list | tuple) else []
    keys = [set(part.keys()) for part in parts if isinstance(part, KeyedJaggedTensor)]
    differ = len(keys) > 1 and len(set().union(*keys)) == sum(map(len, keys))
    is_batch = differ or any(isinstance(part, Tensor) for part in parts)
    return [data] if is_batch else cast(Iterable[Any], data)


def _text(value: Any) -> str:
    """Return a short description of a value for a message, such as: None, 3, a list of 2."""
    if isinstance(value, NO_BATCH) and not isinstance(value, Tensor):
        return f"{value!r:.40}"
    size = f" of {len(value)}" if isinstance(value, list | tuple | Mapping) else ""
    return f"a {type(value).__name__}{size}"


def _by_module(value: Any, modules: Sequence[ModuleTables]) -> list[list[KeyedJaggedTensor]]:
    """Return the KeyedJaggedTensors that each module may look up."""
    if isinstance(value, Mapping) and {module.path for module in modules} & value.keys():
        return [list(find_kjts(value.get(module.path))) for module in modules]
    return [list(find_kjts(value))] * len(modules)


def _values(kjts: Sequence[KeyedJaggedTensor], feature: str, module: ModuleTables) -> list[Tensor]:
    """Return the ids of a feature, in the one KeyedJaggedTensor that has it; nothing without."""
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


def _with_profiles(
    module: ModuleTables, ids: Mapping[str, Sequence[Tensor]], num_samples: int
) -> ModuleTables:
    tables = dict(module.tables)
    for name, table in module.tables.items():
        if table.name in ids:
            rows, columns, values = table.num_embeddings, table.embedding_dim, ids[table.name]
            found = profiled_table(
                table.name, rows, columns, ids=torch.cat(list(values)), num_samples=num_samples
            )
            tables[name] = dataclasses.replace(
                table,
                pooling_factor=found.pooling_factor,
                reuse_histogram=found.reuse_histogram,
            )
    return dataclasses.replace(module, tables=tables)
