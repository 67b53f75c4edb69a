"""Traces of real ranks: their parts sum to the step, and their clocks are compared."""

import itertools
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dlrm_sharded.model.sharded_model import sharded_embeddings
from dlrm_sharded.ranks.distributed import Rank, new_group
from dlrm_sharded.step.parts import ALL_REDUCE, PARTS, WAITING
from dlrm_sharded.step.pipelines import PIPELINES
from dlrm_sharded.tracing.clocks import between, compare_clocks
from dlrm_sharded.tracing.recorded import break_down
from dlrm_sharded.tracing.step_tracer import StepTracer, Trace, TracedSteps
from dlrm_sharded.training.pipeline import make_pipeline
from tests.distributed.small_model import LOCAL_BATCH_SIZE, make_sharded, shares
from tests.preloaded.ranks import gathered, run_ranks

NUM_STEPS = 4
AHEAD_NS = 5_000_000_000


def trace_steps(rank: Rank, kind: str, pipeline: str, compile_mode: str | None) -> dict[str, Any]:
    sharded, optimizer = make_sharded(rank, kind, "sgd", compile_mode=compile_mode)
    steps = make_pipeline(pipeline, sharded, optimizer, rank.device)
    batches = itertools.cycle(shares(rank))
    num_hooks = _num_hooks(sharded)
    traces: list[Trace] = []
    tracer = StepTracer(
        sharded,
        TracedSteps(3, 3 + NUM_STEPS),
        rank,
        local_batch_size=LOCAL_BATCH_SIZE,
        conclude=traces.append,
    )
    times_s = []
    with tracer:
        for step in range(1, tracer.steps.last + 1):
            outer_s = time.perf_counter()
            with tracer.step(step):
                inner_s = time.perf_counter()
                steps.progress(batches)
                times_s.append((outer_s, inner_s, time.perf_counter()))
            times_s[-1] += (time.perf_counter(),)
        tracer.conclude()
    steps.progress(batches)
    assert _num_hooks(sharded) == num_hooks
    assert "input_dist" not in vars(sharded_embeddings(sharded))
    ranks_times_s = gathered(rank, times_s[-NUM_STEPS:])
    if not rank.is_zero:
        return {}
    [trace] = traces
    found = break_down(trace.ranks)
    return {
        "times_s": ranks_times_s,
        "steps_ms": [[end - begin for begin, end in record.steps] for record in trace.ranks],
        "sums_ms": sum(found.breakdown.parts_ms[part] for part in PARTS).tolist(),
        "means_ms": found.breakdown.mean_parts_ms,
        "collectives": [[each.part for each in record.collectives] for record in trace.ranks],
        "first_step": trace.first_step,
        "dense_ms": [list(times) for times in trace.dense_ms],
        "modules": sorted(
            {module for record in trace.ranks for _, _, module in record.operators_ms}
        ),
    }


def _num_hooks(model: torch.nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


@pytest.mark.parametrize(
    ("kind", "pipeline", "world_size"),
    [
        ("columns_uneven", "base", 2),
        ("rows_and_columns", "base", 2),
        ("empty_rank", "sparse_dist", 2),
        ("replicas_and_others", "base", 2),
        ("table_wise", "base", 1),
        ("columns_uneven", "sparse_dist", 3),
        *(("columns_uneven", name, 2) for name in PIPELINES if name not in ("base", "sparse_dist")),
    ],
)
def test_parts_sum_to_the_step(kind, pipeline, world_size):
    found = run_ranks(trace_steps, world_size, kind, pipeline, None)
    check_parts(found, world_size)
    for times_s, steps_ms in zip(found["times_s"], found["steps_ms"], strict=True):
        for (outer, inner, inner_end, outer_end), step_ms in zip(times_s, steps_ms, strict=True):
            # wherever the machine pauses, the recorded step holds the work and lies in the block
            assert 0.98e3 * (inner_end - inner) - 0.2 < step_ms < 1.02e3 * (outer_end - outer) + 0.2


def check_parts(found: dict[str, Any], world_size: int) -> None:
    """Check that the parts of a step sum to it, and that all are there."""
    assert found["first_step"] == 4
    means = [sum(steps_ms) / NUM_STEPS for steps_ms in found["steps_ms"]]
    assert found["sums_ms"] == pytest.approx(means, rel=1e-6)
    means_ms = found["means_ms"]
    for part in ("data", "fwd_compute", "dense_forward", "dense_backward", "bwd_compute"):
        assert means_ms[part] > 0, part
    assert means_ms["optimizer"] > 0
    assert all(forward > 0 and backward > 0 for forward, backward in found["dense_ms"])
    assert "over_arch" in " ".join(found["modules"])
    for collectives in found["collectives"]:
        assert collectives == found["collectives"][0]
    if world_size > 1:
        assert means_ms["input_dist"] > 0
        assert means_ms[ALL_REDUCE] + means_ms[WAITING] > 0
        assert {"input_dist", "fwd_comm", "bwd_comm", ALL_REDUCE} <= set(found["collectives"][0])


def end_within(rank: Rank) -> dict[str, Any]:
    sharded, optimizer = make_sharded(rank, "columns_uneven", "sgd")
    steps = make_pipeline("base", sharded, optimizer, rank.device)
    batches = itertools.cycle(shares(rank))
    num_hooks = _num_hooks(sharded)
    with StepTracer(
        sharded,
        TracedSteps(1, 5),
        rank,
        local_batch_size=LOCAL_BATCH_SIZE,
        conclude=lambda trace: pytest.fail("there is no whole trace"),
    ) as tracer:
        with tracer.step(1):
            steps.progress(batches)
        assert _num_hooks(sharded) > num_hooks
    return {"left": _num_hooks(sharded) - num_hooks}


def test_a_training_that_ends_within_its_traced_steps_has_no_trace():
    assert run_ranks(end_within, 2)["left"] == 0


def test_compiled_layers_are_not_compiled_again():
    found = run_ranks(trace_steps, 2, "columns_uneven", "base", "default")
    assert found["means_ms"]["dense_forward"] > 0


def compare(rank: Rank) -> dict[str, Any]:
    group = new_group(backend="gloo")
    same = compare_clocks(group)

    def ahead() -> int:
        return time.time_ns() + rank.rank * AHEAD_NS

    other = compare_clocks(group, now_ns=ahead, clock_name=f"host {rank.rank}")
    again = compare_clocks(group, now_ns=ahead, clock_name=f"host {rank.rank}")
    both = [between(a, b) for a, b in zip(other, again, strict=True)]
    dist.barrier(group)
    return {
        "same": [(each.ahead_ns, each.uncertainty_ns) for each in same],
        "other": [(each.ahead_ns, each.uncertainty_ns) for each in both],
    }


def test_clocks_of_hosts_are_compared():
    found = run_ranks(compare, 3)
    assert found["same"] == [(0, 0)] * 3
    for rank, (ahead_ns, uncertainty_ns) in enumerate(found["other"]):
        assert abs(ahead_ns - rank * AHEAD_NS) <= uncertainty_ns
        assert (uncertainty_ns == 0) == (rank == 0)
