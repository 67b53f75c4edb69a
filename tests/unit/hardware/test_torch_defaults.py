"""Measurements neither see nor change what a process has set."""

import gc
import logging
import multiprocessing
import os
import random
import signal
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dlrm_sharded.hardware.torch_defaults import torch_defaults

BACKENDS: Any = torch.backends
LOGGERS = ("", "dlrm_sharded", "torch", "torchrec")


def switches() -> dict[str, Any]:
    """Return the settings of torch, NumPy, Python and the environment of this process."""
    cudnn, loggers = BACKENDS.cudnn, [logging.getLogger(name) for name in LOGGERS]
    products = BACKENDS, BACKENDS.cuda.matmul, cudnn.conv, cudnn.rnn, BACKENDS.mkldnn.matmul
    return {
        "fp32 products": [kind.fp32_precision for kind in products],
        "cuDNN": [cudnn.enabled, cudnn.benchmark, cudnn.deterministic],
        "new tensors": (torch.get_default_dtype(), torch.get_default_device()),
        "deterministic": (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        "threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "gradients": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "autocast": [
            (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
            for device in ("cpu", "cuda")
        ],
        "random": (
            torch.get_rng_state().tolist(),
            str(np.random.get_state(legacy=False)),
            random.getstate(),
        ),
        "warnings": list(warnings.filters),
        "logging": [(of.level, of.handlers[:], of.disabled, of.propagate) for of in loggers],
        "process": (dict(os.environ), Path.cwd()),
        "signals": [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)],
        "collector": (gc.isenabled(), gc.get_threshold(), np.geterr()),
        "new processes": multiprocessing.get_start_method(allow_none=True),
    }


def set_everything() -> None:
    """Set what careful or unusual users set, in the newer way where there are two."""
    BACKENDS.cuda.matmul.fp32_precision = "tf32"
    BACKENDS.mkldnn.matmul.fp32_precision = "bf16"
    torch.set_default_dtype(torch.float64)
    torch.use_deterministic_algorithms(True, warn_only=True)


@pytest.fixture(autouse=True)
def products_as_before() -> Iterator[None]:
    """Neither switch of fp32 products is another one after the test."""
    kinds = BACKENDS, BACKENDS.cuda.matmul, BACKENDS.mkldnn.matmul
    before, allowed = [kind.fp32_precision for kind in kinds], BACKENDS.cuda.matmul.allow_tf32
    yield
    BACKENDS.cuda.matmul.allow_tf32 = allowed  # a training of another test may have set it
    for kind, precision in zip(kinds, before, strict=True):
        kind.fp32_precision = precision


@contextmanager
def all_set() -> Iterator[None]:
    try:
        set_everything()
        yield
    finally:
        torch.set_default_dtype(torch.float32)
        torch.use_deterministic_algorithms(False)


def test_a_block_has_the_defaults_and_leaves_no_trace() -> None:
    with all_set(), torch.device("meta"), torch.autocast("cpu"), torch.inference_mode():
        before = switches()
        with torch_defaults():
            made = torch.ones(2, 2)
            assert (made.device.type, (made @ made).dtype) == ("cpu", torch.float32)
            made.requires_grad_().sum().backward()
            assert not torch.are_deterministic_algorithms_enabled()
            torch.manual_seed(1)
            np.random.seed(1)
            random.seed(1)
        assert switches() == before
        with pytest.raises(KeyError), torch_defaults():
            raise KeyError
        assert switches() == before


@pytest.mark.parametrize("allowed", [True, False])
def test_a_training_sets_its_precision_after_either_switch(allowed: bool) -> None:
    with all_set():
        torch.backends.cuda.matmul.allow_tf32 = allowed
        assert BACKENDS.cuda.matmul.fp32_precision == ("tf32" if allowed else "ieee")
