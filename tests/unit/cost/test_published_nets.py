"""NeuroShard's published architecture, kept as it is: what it learns, and what it gets wrong."""

from pathlib import Path

import numpy as np
import pytest
import torch

from dlrm_sharded import ConfigError, RunContext, ShardingPlan, ShardingTask
from dlrm_sharded.calibration.fit_collected import fit_neuroshard
from dlrm_sharded.calibration.neuroshard_fit import fit_paper
from dlrm_sharded.calibration.samples import Sample, workload_of_sample
from dlrm_sharded.cost.published_nets import (
    NeuroShardCostModel,
    PaperNets,
    from_arrays,
    neuroshard_cost_model,
    to_arrays,
)
from dlrm_sharded.hardware.hardware import Hardware
from tests.unit.cost.hardware import reuse_histogram
from tests.unit.synthetic import assert_same_arrays, in_turns, tables_of, task_of

NUM_STEPS = 60


def model_of(nets: PaperNets) -> NeuroShardCostModel:
    return NeuroShardCostModel(nets, name="synthetic", device="cpu")


@pytest.fixture(scope="module")
def paper(costs: tuple[Sample, ...]) -> NeuroShardCostModel:
    return model_of(fit_paper(costs, seed=0, num_steps=NUM_STEPS))


def planned(world_size: int) -> tuple[ShardingPlan, ShardingTask]:
    """As many tables as ranks, one on each, each wider than the one before."""
    tables = tables_of(
        *((10**5, 64 * (i + 1), 5.0, reuse_histogram(10**5, 0.9, 20480)) for i in range(world_size))
    )
    task = task_of(tables, world_size, 10**12, 4096)
    return in_turns(task), task


def test_says_which_world_sizes_it_knows(paper: NeuroShardCostModel) -> None:
    assert len(paper.predict(*planned(4)).per_rank) == 4
    with pytest.raises(ConfigError, match=r"2, 4 ranks, none for 3; use .*=learned"):
        paper.predict(*planned(3))


def error_ms(model: NeuroShardCostModel, samples: tuple[Sample, ...], part: str) -> float:
    """Root of the mean squared error, which is what the nets are trained for."""
    differences = [
        getattr(ours, part) - getattr(theirs, part)
        for sample in samples
        if (sample.kind == "computation") == (part == "computation_ms")
        for ours, theirs in zip(
            model.predict_workload(workload_of_sample(sample)).per_rank,
            sample.cost.per_rank,
            strict=True,
        )
    ]
    return float(np.sqrt(np.mean(np.square(differences))))


def test_an_artifact_is_the_model_and_training_lowers_its_error(
    costs: tuple[Sample, ...], unseen: tuple[Sample, ...], tmp_path: Path
) -> None:
    synthetic = RunContext("cpu", Hardware("synthetic"), "rowwise_adagrad")
    before = torch.get_rng_state()
    paths = [
        fit_neuroshard(costs, synthetic, tmp_path / name, seed=0, num_steps=steps)[0]
        for name, steps in (("1", 1), ("2", NUM_STEPS), ("3", NUM_STEPS))
    ]
    assert torch.equal(torch.get_rng_state(), before)
    untrained, trained, again = (neuroshard_cost_model(RunContext(), str(path)) for path in paths)
    assert_same_arrays(to_arrays(trained.nets), to_arrays(again.nets))
    for part in ("computation_ms", "exchange_ms"):
        assert error_ms(trained, unseen, part) < 0.8 * error_ms(untrained, unseen, part)
    in_memory = model_of(from_arrays(to_arrays(trained.nets)))
    workload = workload_of_sample(unseen[0])
    assert trained.predict_workload(workload) == in_memory.predict_workload(workload)
