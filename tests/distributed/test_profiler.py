"""Traces of real ranks have the stages of the embeddings by name, and change no loss."""

import gzip
import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from dlrm_sharded.plans.plan_cost import INPUT_DIST, STAGES
from dlrm_sharded.ranks.distributed import Rank
from dlrm_sharded.training.pipeline import CLASSES
from dlrm_sharded.training.profiler import StepProfiler
from tests.distributed.small_model import make_sharded, shares
from tests.preloaded.ranks import gathered, run_ranks

TRACED = range(3, 6)
NUM_TRACED = len(TRACED) - 1


def trace_steps(rank: Rank, kind: str, pipeline: str, folder: Path) -> dict[str, Any]:
    """Train seven steps, with traced ones among them and without; losses and weights of ranks."""
    found: dict[str, Any] = {}
    for is_traced in (True, False):
        sharded, optimizer = make_sharded(rank, kind, "sgd")
        batches = itertools.cycle(shares(rank))
        num_hooks = _num_hooks(sharded)
        losses = []
        with StepProfiler(sharded, TRACED, rank, folder) as profiler:
            steps = CLASSES[pipeline](sharded, optimizer, rank.device)
            for step in range(1, TRACED[-1] + 3):
                if is_traced and step == TRACED[0]:
                    profiler.start()
                losses.append(float(steps.progress(batches)[0]))
                if is_traced and step in TRACED[:-1]:
                    profiler.step()
                if is_traced and step == TRACED[-1]:
                    profiler.stop()
        weights = {name: _of_rank(w) for name, w in sharded.state_dict().items()}
        found[str(is_traced)] = gathered(rank, (losses, weights))
        assert _num_hooks(sharded) == num_hooks
    return found


def _of_rank(weight: Any) -> list[torch.Tensor]:
    shards = weight.local_shards() if hasattr(weight, "local_shards") else [weight]
    return [getattr(shard, "tensor", shard).detach().cpu() for shard in shards]


def _num_hooks(model: torch.nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


@pytest.mark.parametrize(
    ("kind", "pipeline", "world_size"),
    [
        ("columns_uneven", "base", 2),
        ("rows_and_columns", "sparse_dist", 2),
        ("replicas_and_others", "base", 2),
        ("table_wise", "base", 1),
    ],
)
def test_traces_name_the_stages_and_change_no_loss(kind, pipeline, world_size, tmp_path):
    found = run_ranks(trace_steps, world_size, kind, pipeline, tmp_path)
    for (losses, weights), (untraced_losses, untraced) in zip(
        found["True"], found["False"], strict=True
    ):
        assert losses == untraced_losses
        assert weights.keys() == untraced.keys()
        for name, of_rank in weights.items():
            assert all(map(torch.equal, of_rank, untraced[name])), name
    check_traces(tmp_path, world_size)


def check_traces(folder: Path, world_size: int) -> None:
    """Check that the trace of each rank has the stages, and those of the backward pass in it."""
    paths = sorted(folder.iterdir())
    assert [path.name for path in paths] == [f"rank{r}.json.gz" for r in range(world_size)]
    for rank, path in enumerate(paths):
        trace = json.loads(gzip.decompress(path.read_bytes()))
        assert trace["distributedInfo"]["rank"] == rank
        regions = [e for e in trace["traceEvents"] if e.get("cat") == "user_annotation"]
        by_name = Counter(event["name"] for event in regions)
        stages = set(STAGES) if world_size > 1 else set(STAGES) - {"bwd_comm"}
        assert {*stages, INPUT_DIST, "dense_forward"} <= by_name.keys()
        assert all(by_name[stage] >= NUM_TRACED for stage in stages)
        assert sum(name.startswith("ProfilerStep#") for name in by_name) == NUM_TRACED
        backward = [e for e in regions if e["name"].startswith("## backward")]
        assert len(backward) >= NUM_TRACED
        for event in regions:
            if event["name"] in stages and event["name"].startswith("bwd_"):
                assert any(_contains(outer, event) for outer in backward), event


def _contains(outer: dict[str, Any], inner: dict[str, Any]) -> bool:
    end = inner["ts"] + inner["dur"]
    return outer["ts"] <= inner["ts"] and end <= outer["ts"] + outer["dur"] + 1e-3
