"""The study of DLRMv3's and DLRMv4's tables: tasks, TorchRec as published, and the table."""

import pytest

from benchmarks import dlrm_v4
from dlrm_sharded.hardware.gpus.gpu_specs import gpu_specs
from dlrm_sharded.plans.task import GIB


def test_tasks_have_the_published_samples_of_a_gpu():
    task = dlrm_v4.task_of("yambda_5b", "h100_sxm", 16)
    assert (task.batch_size, task.topology.ranks_per_host) == (16_384, 8)
    assert task.topology.memory_bytes / GIB == pytest.approx(56)
    assert dlrm_v4.task_of("dlrm_v3_streaming", "b200_sxm", 8).batch_size == 512


def test_torchrec_as_the_published_code_calls_it():
    """Its shards take 37 to 95 GB on 8 GPUs, says that code, which has 560 GB of tables."""
    task = dlrm_v4.task_of("yambda_5b", "b200_sxm", 8)
    plan = dlrm_v4.published_plan(task, dlrm_v4.MODELS["yambda_5b"])
    gib = [size / GIB for size in plan.bytes_by_rank(task.topology)]
    assert sum(gib) == pytest.approx(560, rel=0.01)
    assert 85 < max(gib) < 105
    assert {shard.precision for shard in plan.shards} == {"fp32"}


def test_the_report_has_the_costs_and_the_part_of_the_step():
    rows = [
        row
        for sharder in (dlrm_v4.PUBLISHED, "size")
        for row in dlrm_v4._rows("yambda_5b", "b200_sxm", 8, sharder)
    ]
    published, size = rows
    assert published["cost_ms"] > 0
    assert size["cost_ms"] is None
    found = rows[1] | {"sharder": "neuroshard", "cost_ms": 50.0, "bound_ms": 49.0}
    found |= {"peak_gib": 70.0, "hstu_ms": 150.0, "error": None}
    *_, line = dlrm_v4.report([*rows, found], None).splitlines()
    cost = f"{published['cost_ms']:.1f}"
    assert line in (
        f"| 8 | {cost} | - | 50.0 | 49.0 | 70 | 25 |",
        f"| 8 | ({cost}) | - | 50.0 | 49.0 | 70 | 25 |",
    )


def test_the_layers_take_their_operations():
    """A layer has products with 2,048 and 1,536 columns, and causal attention of 4 times 256."""
    model, spec = dlrm_v4.MODELS["yambda_5b"], gpu_specs()["b200_sxm"]
    tables = dlrm_v4.task_of("yambda_5b", "b200_sxm", 8).tables
    flop = 6 * 2301 * (512 * 2048 + 1536 * 512 + 2301 / 2 * 4 * 256) * 3 * 1024
    ms = flop / (0.5 * spec.bf16_tflops * 1e9)
    assert dlrm_v4.hstu_ms(model, tables, spec) == pytest.approx(ms)
