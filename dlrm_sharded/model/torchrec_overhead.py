"""Spares a training what TorchRec does for nobody in each step: a wait, and regions."""

from __future__ import annotations

import inspect
import sys
from typing import Any

import torch
from torch.profiler import record_function
from torchrec.distributed import dist_data, embedding_sharding

USE = "t_list = _safe_tolist(t)\n                _check_int_overflow("
"""The only place of the module that TorchRec 1.8 calls the function at."""

PACKAGES = ("torchrec.distributed.", "torchrec.optim.")
"""Beginnings of the names of modules whose regions are spared; none of them is a script."""


def spare_overhead() -> None:
    """Change TorchRec's modules in this process, once more after others were loaded."""
    pass_unused_checks_by()
    record_for_profilers_only()


def pass_unused_checks_by() -> bool:
    """Let TorchRec not wait for the sizes of a batch before ranks exchange them; return whether.

    TorchRec 1.8 copies them from the GPU for a check that does nothing unless
    TORCHREC_OVERFLOW_DEBUG is 1, and waits for each copy. Other versions are left as they are,
    unless they do just the same.
    """
    is_checked: bool = getattr(dist_data, "_TORCHREC_OVERFLOW_DEBUG", True)
    if is_checked or not hasattr(embedding_sharding, "_safe_tolist"):
        return False
    source = inspect.getsource(embedding_sharding)
    if USE not in source or source.count("_safe_tolist(") != 2:  # its definition is the other
        return False
    embedding_sharding._safe_tolist = _no_numbers
    return True


def _no_numbers(sizes: Any) -> list[int]:
    return []


def record_for_profilers_only() -> int:
    """Let TorchRec's regions cost little while no profiler runs; return how many modules have some.

    A step has about 30 of them. Each calls two operators of torch, profiler or not.
    """
    return _replace_regions(record_function, Region)


def record_always() -> int:
    """Undo `record_for_profilers_only`."""
    return _replace_regions(Region, record_function)


def _replace_regions(old: type, new: type) -> int:
    num_modules = 0
    for name, module in list(sys.modules.items()):
        if name.startswith(PACKAGES) and vars(module).get("record_function") is old:
            module.record_function = new  # type: ignore[attr-defined]
            num_modules += 1
    return num_modules


class Region(record_function):
    """A named region that only a running profiler is told of."""

    record = None

    def __init__(self, name: str, args: str | None = None) -> None:
        self.name, self.args = name, args

    def __enter__(self) -> Region:
        if torch.autograd._profiler_enabled():
            super().__init__(self.name, self.args)
            super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if self.record is not None:
            super().__exit__(*error)
            self.record = None
