"""Sizes of the studies of the benchmark."""

from __future__ import annotations

from dataclasses import dataclass

ALL_SHARDERS = (
    *("neuroshard", "neuroshard_paper", "torchrec", "torchrec_calibrated", "torchrec_blind"),
    *("torchrec_dp", "hugectr", "embark", "autoshard", "dreamshard"),
    *("size_lookup", "lookup", "dim", "size", "random"),
)
MEASURED_SHARDERS = (
    *("neuroshard", "neuroshard_paper", "torchrec", "torchrec_calibrated"),
    *("autoshard", "dreamshard", "size_lookup", "dim", "random"),
)
TRAINED_SHARDERS = ("neuroshard", "torchrec", "dim", "random")
SCALING_SHARDERS = ("neuroshard", "torchrec", "autoshard", "dreamshard", "dim")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Numbers of tasks, and the sizes of the scaling curves.

    Args:
        planned: numbers of the tasks of each set of `TASK_SETS`.
        mlperf_ranks: numbers of GPUs of MLPerf's tables.
        measured: number of measured tasks by number of ranks.
        rounds: how often each rank of a measured plan is measured.
        trained: number of models that are trained.
        seeds: seeds of the training of each model.
        tables, ranks: sizes of the scaling curves; `base` is the size that the other axis keeps.
        production: numbers of tables and of GPUs of the production-like model.
        published_steps: number of MLPerf's published steps.
    """

    planned: dict[str, tuple[int, ...]]
    mlperf_ranks: tuple[int, ...]
    measured: dict[int, int]
    rounds: int
    trained: int
    seeds: tuple[int, ...]
    tables: tuple[int, ...]
    ranks: tuple[int, ...]
    base: tuple[int, int]
    production: tuple[int, int]
    published_steps: int


FULL = Sizes(
    planned={
        "paper": tuple(range(8)),
        "feasibility": (0, 1, 9, 10, 11, 12, 13, 14, 16, 17, 18),  # all kinds
        "models": tuple(range(9)),
        "scale": (0, 1),
    },
    mlperf_ranks=(8, 16, 64),
    measured={4: 5, 8: 2},
    rounds=3,
    trained=2,
    seeds=(0, 1, 2),
    tables=(10, 100, 1000, 10_000),
    ranks=(2, 8, 32, 128, 1024),
    base=(1000, 32),
    production=(1000, 128),
    published_steps=14,
)
SMALL = Sizes(
    planned={"paper": (0,), "feasibility": (0, 18)},
    mlperf_ranks=(8,),
    measured={2: 1},
    rounds=2,
    trained=1,
    seeds=(0,),
    tables=(5, 10),
    ranks=(2, 4),
    base=(10, 2),
    production=(20, 8),
    published_steps=1,
)
"""Sizes of a rehearsal, whose figures say nothing."""
