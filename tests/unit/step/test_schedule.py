"""The operations of a step come from the table of stages, and leave no time out."""

import dataclasses
import itertools
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import dlrm_sharded
from dlrm_sharded.plans.plan_cost import (
    BACKWARD_STAGES,
    COMPUTE_STAGES,
    EXCHANGE_STAGES,
    FORWARD_STAGES,
    INPUT_DIST,
    STAGES,
    PlanCost,
    StageCost,
)
from dlrm_sharded.step.breakdown import breakdown
from dlrm_sharded.step.parts import EXCHANGES, OPTIMIZER, PART_LABELS, PARTS, DenseTimes
from dlrm_sharded.step.pipelines import TOP_BACKWARD
from dlrm_sharded.step.schedule import SERIAL, Overlap, step_operations
from dlrm_sharded.step.timeline import COMPUTE, EXCHANGE, STREAMS, Operation, run_steps

OVERLAPS = [
    Overlap(exchanges=exchanges, next_ids=next_ids, reads_ahead=reads_ahead)
    for exchanges, next_ids, reads_ahead in itertools.product((False, True), repeat=3)
] + [
    Overlap(exchanges=exchanges, next_ids=True, reads_ahead=True, next_lookup=place)
    for exchanges in (False, True)
    for place in (OPTIMIZER, TOP_BACKWARD)
]
DENSE_KEYS = tuple(
    field.name
    for field in dataclasses.fields(DenseTimes)
    if field.name.endswith("_ms") and field.name not in ("other_ms", "launch_ms")
)
ALL_REDUCE_MS = 3.0
ROUNDING = 1e-9


def random_cost(rng: np.random.Generator, num_ranks: int) -> PlanCost:
    stages_ms = {stage: rng.gamma(1.0, 5.0, num_ranks).tolist() for stage in STAGES}
    return PlanCost.from_stages(stages_ms, input_dist_ms=rng.gamma(1.0, 2.0, num_ranks).tolist())


def random_dense(rng: np.random.Generator) -> DenseTimes:
    return DenseTimes(**{key: float(rng.gamma(1.0, 3.0)) for key in DENSE_KEYS})


def operations_of(overlap: Overlap, num_ranks: int = 2, seed: int = 0):
    rng = np.random.default_rng(seed)
    cost, dense = random_cost(rng, num_ranks), [random_dense(rng) for _ in range(num_ranks)]
    return cost, step_operations(cost, dense, all_reduce_ms=ALL_REDUCE_MS, overlap=overlap)


def test_the_table_divides_the_stages_into_groups() -> None:
    assert STAGES == ("fwd_compute", "fwd_comm", "bwd_comm", "bwd_compute")
    assert (*FORWARD_STAGES, *BACKWARD_STAGES) == STAGES
    assert set(COMPUTE_STAGES) == set(STAGES) - set(EXCHANGE_STAGES) == {STAGES[0], STAGES[3]}
    assert EXCHANGES == (INPUT_DIST, "fwd_comm", "bwd_comm", "all_reduce")
    assert set(PART_LABELS) == set(PARTS)
    assert [part for part in PARTS if part in STAGES] == list(STAGES)
    cost = StageCost(1.0, 2.0, 4.0, 8.0)
    assert (cost.computation_ms, cost.exchange_ms, cost.total_ms) == (9.0, 6.0, 15.0)
    assert cost.with_stages({"fwd_comm": 3.0}) == StageCost(1.0, 3.0, 4.0, 8.0)


@pytest.mark.parametrize("overlap", OVERLAPS, ids=str)
def test_every_stage_is_an_operation_with_its_times_and_its_stream(overlap: Overlap) -> None:
    cost, operations = operations_of(overlap)
    by_name = {op.name: op for op in operations}
    in_order = (*BACKWARD_STAGES, *FORWARD_STAGES) if overlap.next_lookup == OPTIMIZER else STAGES
    assert [op.name for op in operations if op.name in STAGES] == list(in_order)
    assert {op.part for op in operations if op.is_collective} == set(EXCHANGES)
    for stage in STAGES:
        op = by_name[stage]
        assert op.part == stage
        assert op.times_ms.tolist() == [rank.stage_ms(stage) for rank in cost.per_rank]
        assert op.is_collective == (stage in EXCHANGE_STAGES)
        beside = overlap.exchanges and stage in EXCHANGE_STAGES
        assert op.stream == (EXCHANGE if beside else COMPUTE)


def test_a_rank_issues_its_operations_in_the_order_of_the_model_and_of_autograd() -> None:
    _, operations = operations_of(SERIAL)
    assert [(op.name, op.after) for op in operations] == [
        ("data", ()),
        (INPUT_DIST, ("data",)),
        ("fwd_compute", (INPUT_DIST,)),
        ("fwd_comm", ("fwd_compute",)),
        ("bottom_forward", ()),
        ("top_forward", ("fwd_comm",)),
        ("top_backward", ()),
        ("bwd_comm", ("top_backward",)),
        ("bottom_backward", ()),
        ("all_reduce", ("bottom_backward",)),
        ("bwd_compute", ("bwd_comm",)),
        ("optimizer", ("all_reduce",)),
        ("other", ()),
    ]


def slowest_stream_ms(operations: tuple[Operation, ...]) -> float:
    """Time of the operations of a stream on a rank, the longest of all streams and ranks."""
    by_stream = [[op.times_ms for op in operations if op.stream == stream] for stream in STREAMS]
    return max(float(np.sum(times, axis=0).max()) for times in by_stream if times)


@pytest.mark.parametrize("num_ranks", [1, 2, 8])
@pytest.mark.parametrize("overlap", OVERLAPS, ids=str)
def test_no_step_is_shorter_than_its_slowest_stream(overlap: Overlap, num_ranks: int) -> None:
    for seed in range(5):
        _, operations = operations_of(overlap, num_ranks, seed)
        timeline = run_steps(operations, num_steps=40)
        # a long run, as a step of overlapping ones may be short if others before it were long
        settled_ms = float(np.diff(timeline.step_ends_ms)[20:].mean())
        assert settled_ms >= slowest_stream_ms(operations) * (1 - ROUNDING)


@pytest.mark.parametrize("num_ranks", [1, 2, 8])
def test_a_step_without_overlap_is_no_shorter_than_the_critical_path(num_ranks: int) -> None:
    for seed in range(5):
        cost, operations = operations_of(SERIAL, num_ranks, seed)
        least_ms = cost.critical_path_ms + (cost.input_dist_max_ms or 0.0) + ALL_REDUCE_MS
        step_ms = breakdown(run_steps(operations)).step_ms
        assert step_ms >= least_ms * (1 - ROUNDING)


MORE = "fwd_more_ms: Annotated[float, Stage(FORWARD, 'more')]"
MORE_BACKWARD = "bwd_more_ms: Annotated[float, Stage(BACKWARD, 'more')]"
FURTHER_STAGES = {
    # name: (the field after which it stands, or "" for the first place; its stage)
    "permutes before the lookup": ("", MORE),
    "copies after the exchange": ("fwd_comm_ms", MORE),
    "exchanges twice": ("fwd_comm_ms", MORE.replace(")", ", is_exchange=True)")),
    "permutes gradients": ("fwd_comm_ms", MORE_BACKWARD),
    "exchanges after the update": (
        "bwd_compute_ms",
        MORE_BACKWARD.replace(")", ", is_exchange=True)"),
    ),
}
CHECK = f"""
from dlrm_sharded.plans.plan_cost import STAGES, PlanCost
from dlrm_sharded.step.breakdown import breakdown
from dlrm_sharded.step.parts import PARTS, DenseTimes
from dlrm_sharded.step.schedule import PIPELINED, SERIAL, step_operations
from dlrm_sharded.step.timeline import run_steps

[more] = [stage for stage in STAGES if stage.endswith("more")]
assert len(STAGES) == 5 and [part for part in PARTS if part in STAGES] == list(STAGES)
times = dict.fromkeys(STAGES, [1.0, 1.0]) | dict([(more, [100.0, 100.0])])
cost = PlanCost.from_stages(times, input_dist_ms=[1.0, 1.0])
dense = DenseTimes(**dict.fromkeys({DENSE_KEYS}, 1.0))
for overlap in (SERIAL, PIPELINED):
    operations = step_operations(cost, dense, all_reduce_ms=1.0, overlap=overlap)
    assert [op.name for op in operations if op.name in STAGES] == list(STAGES)
    found = breakdown(run_steps(operations, num_steps=10))
    assert found.step_ms >= 100.0, found.step_ms
    # bottom layers, and nothing else, are beside an exchange
    assert found.mean_ms(more) >= 98.0, found.mean_parts_ms
    if overlap == SERIAL:
        assert abs(found.step_ms - cost.critical_path_ms - 8.0) < 1e-9, found.step_ms
"""


@pytest.mark.parametrize("name", FURTHER_STAGES)
def test_a_further_stage_is_in_the_step_where_the_table_has_it(name: str, tmp_path: Path) -> None:
    package = Path(dlrm_sharded.__file__).parent
    for room in ("files", "plans", "step"):
        shutil.copytree(package / room, tmp_path / "dlrm_sharded" / room)
    (tmp_path / "dlrm_sharded" / "__init__.py").touch()
    table = tmp_path / "dlrm_sharded" / "plans" / "plan_cost.py"
    before, field = FURTHER_STAGES[name]
    lines = table.read_text().splitlines()
    place = next(i for i, line in enumerate(lines) if line.startswith(f"    {before or 'fwd_'}"))
    lines.insert(place + (before != ""), f"    {field}")
    table.write_text("\n".join(lines))
    done = subprocess.run(
        [sys.executable, "-c", CHECK],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
