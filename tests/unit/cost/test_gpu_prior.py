"""Cost models of GPUs that nobody calibrated."""

import dataclasses
import logging

import numpy as np
import pytest

from dlrm_sharded import ConfigError, RunContext, ShardingPlan
from dlrm_sharded.accesses.profiles import with_profiles
from dlrm_sharded.calibration.priors import learned_cost_model
from dlrm_sharded.cost.bound import lower_bound_ms
from dlrm_sharded.cost.gpu_lookups import UPDATE_LINES, gpu_compute
from dlrm_sharded.cost.gpu_prior import gpu_cost_model
from dlrm_sharded.cost.workload import workload_of_tables
from dlrm_sharded.hardware.gpus.gpu_specs import gpu_specs
from dlrm_sharded.hardware.hardware import Hardware
from dlrm_sharded.model.fused_optimizers import EMBEDDING_OPTIMIZERS
from dlrm_sharded.plans.layouts import Replicas
from dlrm_sharded.plans.task import ShardingTask
from dlrm_sharded.testing import check_cost_model, small_tasks
from tests.unit.synthetic import USED_ONCE, in_turns, mlperf_task, tables_of, task_of, with_topology

H100 = RunContext("cuda", Hardware("NVIDIA H100 80GB HBM3"))


def mlperf(world_size: int = 8) -> ShardingTask:
    return with_profiles(mlperf_task(world_size))


def lookup_ms(
    context: RunContext, *, cols: int, ids: float, rows: int = 10**7, bags: int = 8192
) -> tuple[float, float]:
    compute = learned_cost_model(context).compute
    workload = workload_of_tables(tables_of((rows, cols, ids / bags, USED_ONCE)), bags)
    sums = workload.by_rank(compute.vectors(workload))
    forward, backward = compute.times_ms(sums, np.ones(1))[0]
    return float(forward), float(backward)


TASKS = {
    name: with_topology(task, compute_device="cuda")
    for name, task in small_tasks().items()
    if name != "w2-odd_names"
}


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
def test_search_and_bound_may_rely_on_it(task: ShardingTask) -> None:
    check_cost_model(learned_cost_model(H100), task)


def test_mlperfs_tables_take_milliseconds(caplog: pytest.LogCaptureFixture) -> None:
    """NVIDIA's whole step, with dense layers, takes 4.02 ms on 8 H100."""
    task = mlperf()
    model = learned_cost_model(H100)
    plan = in_turns(task)
    cost = model.predict(plan, task)
    assert 1.0 < lower_bound_ms(model.cost_task(task)) <= cost.cost_ms < 20.0
    assert min(rank.fwd_comm_ms for rank in cost.per_rank) > 0.1
    assert model.caveat(task.topology) is None
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_topologys_bandwidths_replace_nominal_ones() -> None:
    task, model = mlperf(16), learned_cost_model(H100)
    plan = in_turns(task)

    def comm_ms(**bandwidths: float) -> float:
        return model.predict(plan, with_topology(task, **bandwidths)).per_rank[0].fwd_comm_ms

    assert comm_ms(inter_host_bytes_per_s=50e9) == comm_ms()
    assert comm_ms(inter_host_bytes_per_s=5e9) > 5 * comm_ms()
    assert comm_ms(intra_host_bytes_per_s=1e9) > 5 * comm_ms()


def test_optimizers_differ_in_the_rows_they_update() -> None:
    assert {*UPDATE_LINES} == {*EMBEDDING_OPTIMIZERS}
    sgd, rowwise, elementwise, adam, unknown = (
        lookup_ms(dataclasses.replace(H100, optimizer=name), cols=128, ids=1e6)
        for name in ("sgd", "rowwise_adagrad", "elementwise_adagrad", "adam", None)
    )
    assert sgd[0] == rowwise[0] == elementwise[0] == adam[0]
    assert sgd[1] < rowwise[1] < 1.2 * sgd[1] < elementwise[1]
    assert 1.3 * sgd[1] < adam[1] < 3 * sgd[1]
    assert elementwise[1] == pytest.approx((sgd[1] + adam[1]) / 2)
    assert unknown == rowwise


@pytest.mark.parametrize("key", list(gpu_specs()))
def test_every_gpu_has_a_prior(key: str) -> None:
    spec = gpu_specs()[key]
    model = learned_cost_model(RunContext("cuda", Hardware(spec.device_name)))
    assert (model.provenance.kind, model.provenance.hardware) == ("prior", spec.device_name)
    assert model.provenance.error == (0.5 if spec.link == "nvlink" else 0.7)
    assert "within 13 and 28 % on average; an H200 with row-wise" in model.provenance.text
    forward, backward = lookup_ms(RunContext("cuda", Hardware(spec.device_name)), cols=128, ids=1e7)
    bandwidth = 1e7 * 512 / forward / 1e6
    assert 0.2 * spec.memory_gb_per_s < bandwidth < spec.memory_gb_per_s
    assert forward < backward < 6 * forward


@pytest.mark.parametrize("name", [None, "NVIDIA Z999"])
def test_an_unknown_gpu_has_a_generic_prior(
    name: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    model = learned_cost_model(RunContext("cuda", Hardware(name)))
    assert model.provenance.error == 1.0
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "figures of h100_sxm stand for a data-center GPU" in record.message
    assert (name or "no GPU is named") in record.message


def test_figures_of_an_unknown_gpu() -> None:
    figures = {"memory_gb_per_s": 1675, "link_gb_per_s": 450}
    model = learned_cost_model(RunContext("cuda", Hardware("NVIDIA Z999")), gpu=figures)
    assert model.name == "GPU with stated figures"
    compute = gpu_compute(gpu_specs()["h100_sxm"], None)
    np.testing.assert_allclose(model.compute.crowding.term_ms, 2 * compute.crowding.term_ms)
    ids = compute.device.terms.index("ids")
    for slow, fast in zip(model.compute.nets, compute.nets, strict=True):
        assert slow.biases[0][ids] == pytest.approx(fast.biases[0][ids] + np.log(2.0))
    with pytest.raises(ConfigError, match=r"cost_model\.gpu has the keys \['speed'\]"):
        learned_cost_model(RunContext("cuda"), gpu={"speed": 1})


def test_replicas_have_a_cost() -> None:
    """They save the exchange of their vectors and cost an all-reduce of their gradients."""
    tables = tables_of(*((10 ** (2 + i % 5), 64, 4.0) for i in range(26)))
    task = with_profiles(task_of(tables, 4, 10**10, 4096, device="cuda"))
    model, whole = gpu_cost_model(H100), in_turns(task)
    replicated = [shard for table in tables[:12] for shard in Replicas(4).shards(table)]
    mixed = ShardingPlan(4, (*replicated, *whole.shards[12:]))
    with_replica, without = (model.predict(plan, task) for plan in (mixed, whole))
    assert with_replica.stage_max_ms("fwd_comm") < without.stage_max_ms("fwd_comm")
    assert with_replica.stage_max_ms("bwd_comm") > without.stage_max_ms("bwd_comm")
