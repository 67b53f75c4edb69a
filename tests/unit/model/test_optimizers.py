"""Learning rates over steps, and what optimizers cost in memory."""

import math
import re
from typing import Any

import pytest
import torch

from dlrm_sharded.files.errors import ConfigError
from dlrm_sharded.model.optimizers import (
    DENSE_OPTIMIZERS,
    EMBEDDING_OPTIMIZERS,
    OptimizerConfig,
    Schedule,
)
from dlrm_sharded.plans.table_optimizers import CAN_REPLICATE, memory_of, why_not_replicated


def config(**changes: Any) -> OptimizerConfig:
    defaults = {
        "embedding": "sgd",
        "embedding_learning_rate": 0.5,
        "dense": "sgd",
        "dense_learning_rate": 0.05,
    }
    return OptimizerConfig(**{**defaults, **changes})


FULL = Schedule(warmup_steps=4, decay_start_step=6, decay_steps=10)


@pytest.mark.parametrize(
    ("schedule", "factors"),
    [
        (FULL, {0: 0.25, 2: 0.75, 3: 1.0, 5: 1.0, 6: 1.0, 11: 0.25, 15: 0.01, 16: 0.0, 1000: 0.0}),
        (Schedule(), {0: 1.0, 10**9: 1.0}),
        (Schedule(warmup_steps=2), {0: 0.5, 1: 1.0, 10**9: 1.0}),
        (Schedule(decay_steps=2), {0: 1.0, 1: 0.25, 2: 0.0}),
    ],
    ids=["all_phases", "constant", "warmup_only", "decay_only"],
)
def test_schedule(schedule, factors):
    assert {step: schedule.factor(step) for step in factors} == pytest.approx(factors)


BAD_VALUES = {
    "embedding": ("adamw",),
    "dense": ("rowwise_adagrad",),
    "embedding_learning_rate": (-0.1,),
    "dense_learning_rate": (math.nan, math.inf),
    "clip_norm": (0.0, math.nan),
}


@pytest.mark.parametrize(
    ("key", "value"), [(key, value) for key, values in BAD_VALUES.items() for value in values]
)
def test_bad_values_name_their_key(key, value):
    with pytest.raises(ConfigError, match=rf"optimizer\.{key} is {re.escape(repr(value))}"):
        config(**{key: value})


@pytest.mark.parametrize(
    ("key", "known"), [("embedding", EMBEDDING_OPTIMIZERS), ("dense", DENSE_OPTIMIZERS)]
)
def test_unknown_optimizer_lists_the_known(key, known):
    with pytest.raises(ConfigError, match=f"known: {', '.join(known)}"):
        config(**{key: "adamw"})


@pytest.mark.parametrize(
    ("embedding", "bytes_per_element", "bytes_per_row"),
    [("sgd", 4, 0), ("rowwise_adagrad", 4, 4), ("elementwise_adagrad", 8, 0), ("adam", 12, 0)],
)
def test_memory(embedding, bytes_per_element, bytes_per_row):
    """Weight, two moments, one number a row: what FBGEMM keeps in fp32."""
    assert memory_of(embedding) == (bytes_per_element, bytes_per_row)


@pytest.mark.parametrize("embedding", EMBEDDING_OPTIMIZERS)
def test_replicas_need_an_optimizer_that_skips_rows(embedding):
    reason = why_not_replicated(embedding)
    assert (reason is None) == (embedding in CAN_REPLICATE)
    assert reason is None or "use sgd or rowwise_adagrad" in reason


@pytest.mark.parametrize("embedding", EMBEDDING_OPTIMIZERS)
def test_fused_adam_needs_cuda(embedding):
    config(embedding=embedding).check_device(torch.device("cuda"))
    if embedding == "adam":
        with pytest.raises(ConfigError, match="use sgd or rowwise_adagrad"):
            config(embedding=embedding).check_device(torch.device("cpu"))
    else:
        config(embedding=embedding).check_device(torch.device("cpu"))
