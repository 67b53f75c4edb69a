"""Advice: what pays off, what is tied, and what is said of it."""

import dataclasses
import math

import numpy as np
import pytest

from dlrm_sharded.dense.gpu_prices import DENSE_ERROR
from dlrm_sharded.files.errors import ConfigError
from dlrm_sharded.hardware.gpus.gpu_specs import gpu_names
from dlrm_sharded.plans.plan import Shard, ShardingPlan
from dlrm_sharded.plans.plan_cost import PlanCost, StageCost
from dlrm_sharded.plans.plan_report import PlanReport
from dlrm_sharded.plans.standing import Standing
from dlrm_sharded.plans.tables import Table
from dlrm_sharded.plans.task import GIB, ShardingTask, Topology
from dlrm_sharded.ranks.workers import Refusal
from dlrm_sharded.simulation import machines
from dlrm_sharded.simulation.advice_text import (
    choice_text,
    fits_text,
    overrides_text,
    scaling_text,
    table_lines,
)
from dlrm_sharded.simulation.candidates import Candidate, Case, Outcome, no_outcome
from dlrm_sharded.simulation.choice import choose, is_tied, value_of
from dlrm_sharded.simulation.machines import (
    CPU_NAMES,
    Machine,
    TableMemory,
    machine_of,
    with_prices,
)
from dlrm_sharded.simulation.planned import Planned
from dlrm_sharded.simulation.scaling import gain_of, scaling_of
from dlrm_sharded.step.breakdown import Breakdown
from dlrm_sharded.step.host_time import LOOP_MS, HostTime
from dlrm_sharded.step.parts import PARTS
from dlrm_sharded.step.prediction import StepPrediction

MEMORY = TableMemory(memory_gib=None, memory_fraction=0.7)
H100 = machine_of("h100", MEMORY)
A100 = machine_of("a100", MEMORY)
STATED = Topology(1, 1)
TABLES = (Table("a", 1000, 16, 2.0),)
BATCH_SIZE = 1024


def candidate(
    machine: Machine = H100,
    num_ranks: int = 8,
    *,
    sharder: str = "dim",
    error: float | None = 0.1,
    batch_size: int = BATCH_SIZE,
    host: HostTime | None = None,
    **parts_ms: float,
) -> Candidate:
    """A candidate whose step has the given parts, or takes what its host needs."""
    task = ShardingTask(TABLES, machine.topology(num_ranks, STATED), batch_size)
    plan = ShardingPlan(num_ranks, (Shard.whole(TABLES[0], 0),))
    cost = PlanCost((StageCost(1.0, 0.0, 0.0, 0.0),) * num_ranks)
    standing = Standing("prior", "GPU", error=error)
    parts = {part: np.array([parts_ms.get(part, 0.0)]) for part in PARTS}
    outcome = Outcome(
        Planned(sharder, plan, PlanReport(sharder, 0.1, cost, standing=standing)),
        StepPrediction(
            Breakdown(parts).launched_in(0.0 if host is None else host.ms),
            batch_size,
            error,
            host,
        ),
    )
    return Candidate(Case(machine, num_ranks, sharder, batch_size, task), outcome)


def failed(machine: Machine, message: str, *, memory_bytes: int = GIB) -> Candidate:
    """A candidate that has no plan, of tables that miss 3 GiB if they do not fit."""
    tables = (Table("a", (3 * GIB + 8 * memory_bytes) // 64, 16, 2.0),)
    topology = dataclasses.replace(machine.topology(8, STATED), memory_bytes=memory_bytes)
    task = ShardingTask(tables, topology, BATCH_SIZE)
    case = Case(machine, 8, "dim", BATCH_SIZE, task)
    return Candidate(case, Refusal(message, is_infeasible=memory_bytes < GIB))


def test_figures_of_a_candidate() -> None:
    found = candidate(priced(H100, 3.0), fwd_compute=2.0, top_forward=0.0, fwd_comm=2.0)
    assert found.step_ms == 4.0
    assert found.samples_per_s == 1e3 * BATCH_SIZE / 4.0
    assert found.hours(3600 * found.samples_per_s) == pytest.approx(1.0)
    assert found.price(3600 * found.samples_per_s) == pytest.approx(8 * 3.0)
    assert found.group_share("lookups") == found.group_share("exchanges") == 0.5


def priced(machine: Machine, price: float) -> Machine:
    return dataclasses.replace(machine, price=price)


def test_memory_of_a_rank() -> None:
    assert H100.rank_bytes == int(0.7 * 80 * GIB), "56 GiB, as in conf/topology/h100_80gb.yaml"
    assert H100.topology(4, STATED).ranks_per_host == 4
    assert H100.topology(32, STATED).ranks_per_host == 8
    assert machine_of("l40s", TableMemory(20.0, 0.7, reserved_gib=5.0)).rank_bytes == 15 * GIB
    assert machine_of("h100", TableMemory(80.0, 0.7)).rank_bytes == 80 * GIB
    with pytest.raises(ConfigError, match=r"^500 GiB of a rank are stated .* h100_sxm has 80 GiB"):
        machine_of("h100", TableMemory(500.0, 0.7))
    with pytest.raises(ConfigError, match="12 ranks do not fill hosts of 8"):
        H100.topology(12, STATED)
    with pytest.raises(ConfigError, match=r"^topology.reserved_gib is 90, .* 56 GiB that h100"):
        machine_of("h100", TableMemory(None, 0.7, reserved_gib=90.0))
    with pytest.raises(ConfigError, match=r"^hardware is 'h101'; known are cpu, here, v100"):
        machine_of("h101", MEMORY)


def test_the_names_of_known_hardware_are_those_of_the_table_of_gpus() -> None:
    with pytest.raises(ConfigError, match=r"known are cpu, here, v100, .*h200, .*gb300$") as error:
        machine_of("h101", MEMORY)
    names = str(error.value).partition("known are ")[2].split(", ")
    assert names == [*CPU_NAMES, *gpu_names()]
    assert all(machine_of(name, TableMemory(1.0, 0.7)).name == name for name in names)


def test_ranks_of_a_host_share_its_memory() -> None:
    machine = Machine("here", None, rank_bytes=None, host_bytes=100)
    topology = machine.topology(1, STATED)
    assert (topology.memory_bytes, topology.compute_device) == (100, "cpu")
    with pytest.raises(ConfigError, match="100000 ranks need as many cores"):
        machine.topology(100_000, STATED)
    assert (machine.dense_error, H100.dense_error) == (0.0, DENSE_ERROR)


def test_stated_memory_is_not_more_than_is_free_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machines, "available_host_bytes", lambda: 10 * GIB)
    assert machine_of("here", TableMemory(10.0, 0.7)).topology(1, STATED).memory_bytes == 10 * GIB
    with pytest.raises(ConfigError, match=r"takes 11 GiB on 1 ranks, .* has 10 GiB available"):
        machine_of("here", TableMemory(11.0, 0.7)).topology(1, STATED)


def test_a_price_may_have_another_name_of_the_gpu() -> None:
    found = with_prices([H100, A100], {"h100_sxm": 2, "a100": 1.5, "l40s": None})
    assert [machine.price for machine in found] == [2, 1.5]
    assert [m.price for m in with_prices([H100, A100], {"h100": None})] == [None, None]


@pytest.mark.parametrize(
    ("prices", "message"),
    [
        ({"h100": 2}, "prices.a100 is not set"),
        ({"h100": 2, "h100_sxm": 2, "a100": 1}, "prices.h100 is stated under several names"),
        ({"h100": 2, "a100": 1, "l40s": 1}, "prices.l40s is stated, but hardware is h100, a100"),
        ({"h100": -2, "a100": 1}, "prices.h100 is -2, must be a number > 0"),
        ({"h100": "2 EUR", "a100": 1}, "prices.h100 is '2 EUR', must be a number"),
        ({"cpu": 1, "h100": 2, "a100": 1}, "prices.cpu is stated"),
    ],
)
def test_prices_that_are_refused(prices: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}"):
        with_prices([H100, A100], prices)


def test_ideal_scaling_has_no_limit() -> None:
    sizes = [candidate(num_ranks=n, dense_forward=16 / n, fwd_compute=8 / n) for n in (4, 1, 2)]
    found = scaling_of(sizes)
    assert (found.last.case.num_ranks, found.limit) == (4, None)
    assert gain_of(sizes[1], sizes[0]) == pytest.approx(1.0)
    assert "the most that were asked for" in (scaling_text(found) or "")


def test_the_part_that_does_not_scale_is_the_limit() -> None:
    """The exchange's share grows more, but the dense layers are what keeps the step from 5 ms."""
    four = candidate(num_ranks=4, dense_forward=9.0, bwd_comm=0.2, fwd_compute=0.8)
    eight = candidate(num_ranks=8, dense_forward=8.0, bwd_comm=2.0, fwd_compute=0.4)
    limit = scaling_of([four, eight]).limit
    assert limit is not None
    assert (limit.group, limit.part) == ("dense", "dense_forward")
    assert (limit.ideal_ms, limit.ms) == (4.5, 8.0)
    text = scaling_text(scaling_of([four, eight]))
    assert text is not None
    assert "up to 4 ranks: 8 give -4 % of the ideal gain, because of the dense layers" in text


def test_weak_scaling_keeps_the_time_of_a_rank() -> None:
    one = candidate(num_ranks=1, batch_size=100, dense_forward=1.0)
    two = candidate(num_ranks=2, batch_size=200, dense_forward=1.0, bwd_comm=9.0)
    assert gain_of(one, candidate(num_ranks=2, batch_size=200, dense_forward=1.0)) == 1.0
    limit = scaling_of([one, two]).limit
    assert limit is not None
    assert (limit.group, limit.ideal_ms, limit.ms) == ("exchanges", 0.0, 9.0)


def test_one_size_has_no_scaling() -> None:
    assert scaling_text(scaling_of([candidate(fwd_compute=1.0)])) is None


def test_without_prices_sizes_that_do_not_pay_off_are_not_chosen() -> None:
    sizes = [candidate(num_ranks=n, dense_forward=ms) for n, ms in ((8, 2.0), (16, 1.9))]
    choice = choose([*sizes, candidate(A100, dense_forward=9.0)], least_gain=0.5)
    assert (choice.objective, choice.best) == ("time", sizes[0])
    assert choice.runner_up is not None
    assert choice.runner_up.case.machine == A100
    assert choice.loss(choice.runner_up) == pytest.approx(3.5)
    assert "4.5 times as long" in choice_text(choice, samples=None)


def test_with_prices_the_cheapest_one_is_chosen() -> None:
    fast = candidate(priced(H100, 4.0), dense_forward=1.0)
    slow = candidate(priced(A100, 1.0), dense_forward=3.0)
    choice = choose([fast, slow], least_gain=0.5)
    assert (choice.objective, choice.best) == ("price", slow)
    assert choice.loss(fast) == pytest.approx(1 / 3)
    text = choice_text(choice, samples=1e9)
    assert text.startswith("rent 8 a100: ")
    assert "the runner-up, 8 h100, costs 33.3 % more" in text


def test_ties_of_two_machines_follow_from_both_errors() -> None:
    best = candidate(dense_forward=1.0, error=0.1)
    near = candidate(A100, dense_forward=1.1, error=0.1)
    far = candidate(A100, dense_forward=1.2, error=0.1)
    assert is_tied(best, near, "time")
    assert not is_tied(best, far, "time")
    assert is_tied(best, candidate(A100, dense_forward=1.2, error=None), "time"), "unknown error"
    text = choice_text(choose([best, near], least_gain=0.5), samples=None)
    assert "tied with 8 a100: the answer depends on the error of the prices" in text


def test_sharders_share_the_errors_of_a_machine() -> None:
    best = candidate(dense_forward=1.0, fwd_compute=1.0, error=0.5)
    assert is_tied(best, candidate(dense_forward=1.0, fwd_compute=1.1, error=0.5), "time")
    slower = candidate(sharder="size", dense_forward=1.0, fwd_compute=1.3, error=0.5)
    assert not is_tied(best, slower, "time"), "the difference is off by half, not the step"
    traded = candidate(dense_forward=1.0, fwd_compute=0.2, fwd_comm=1.1, error=0.5)
    assert is_tied(best, traded, "time"), "lookups and exchanges are off independently"
    text = choice_text(choose([best, slower], least_gain=0.5), samples=None)
    assert text.startswith("use sharder=dim: ")
    assert text.endswith("15.0 % longer, which the errors of the predictions do not explain")


HOST = HostTime(4.0 - LOOP_MS, 1.0)
"""A host that needs 5 ms for a step."""


def test_sharders_tie_if_the_host_bounds_them() -> None:
    """The one with the least work of the GPUs comes first; prices of lookups decide nothing."""
    sharders = [
        candidate(sharder=name, fwd_compute=ms, host=HOST)
        for name, ms in (("size", 4.0), ("dim", 1.0), ("lookup", 2.0))
    ]
    choice = choose(sharders, least_gain=0.5)
    assert [c.case.sharder for c in choice.ranking] == ["dim", "lookup", "size"]
    assert len(choice.tied) == 2
    text = choice_text(choice, samples=None)
    assert "any of them will do, as the host bounds them all. Its step is bound by the host" in text
    assert "the GPUs need 1.0 ms for a step, the host 5.0 ms (a prior, within about 30 %)" in text
    best = candidate(fwd_compute=1.0, host=HOST, error=0.5)
    more = HostTime(4.0 - LOOP_MS, 2.0)
    slower = candidate(sharder="two", fwd_compute=4.0, host=more, error=0.5)
    assert not is_tied(best, slower, "time"), "its host needs more, whatever its lookups take"
    unbound = candidate(sharder="slow", fwd_compute=9.0, host=HOST)
    assert "any of them will do" not in choice_text(
        choose([sharders[1], unbound], least_gain=0.5), samples=None
    )


def test_the_host_does_not_scale() -> None:
    """More ranks have less work each, and their hosts as much as before."""
    sizes = [candidate(num_ranks=n, dense_forward=ms, host=HOST) for n, ms in ((8, 6.0), (16, 3.0))]
    scaling = scaling_of(sizes)
    assert scaling.limit is not None
    assert scaling.limit.group == "host"
    assert "because of the waits for the host, which take 2.00 ms" in (scaling_text(scaling) or "")


def test_the_table_says_what_bounds_a_step() -> None:
    rows = [candidate(fwd_comm=2.0, host=HOST), candidate(A100, fwd_comm=7.0, host=HOST)]
    titles, _, first, second = table_lines(rows, samples=None)
    assert titles.endswith("| waiting, % | host, % | GPUs, ms | host, ms |")
    assert first.endswith("| 0 | 60 | 2.00 | 5.00 |")
    assert second.endswith("| 0 | 0 | 7.00 | 5.00 |")
    assert "host" not in table_lines([candidate(fwd_comm=2.0)], samples=None)[0]
    figures = rows[0].to_json(None)
    assert (figures["device_ms"], figures["host_ms"]) == (2.0, pytest.approx(5.0))
    assert figures["host_wait_ms"] == pytest.approx(3.0)


def test_the_table_has_the_columns_that_differ() -> None:
    large = failed(A100, "tables are too large", memory_bytes=1024)
    lines = table_lines([candidate(fwd_comm=2.0), large], samples=None)
    assert lines[0].startswith("| hardware | fits | ")
    assert "price" not in lines[0]
    assert lines[2].startswith("| h100 | yes | 1.00 | 2.00 | 512,000 | 10 | ")
    assert lines[3].startswith("| a100 | no: 3 GiB are missing | - | - | ")
    assert len({line.count("|") for line in lines}) == 1
    assert fits_text(failed(A100, "a |\nreally")) == "no: a / really"


def test_sharders_are_sorted() -> None:
    slow = dataclasses.replace(candidate(sharder="size"), result=Refusal("too slow"))
    rows = [slow, candidate(sharder="dim", fwd_comm=2.0), candidate(fwd_comm=1.0, sharder="x")]
    lines = table_lines(rows, samples=1e6)
    assert [line.split(" ")[1] for line in lines[2:]] == ["x", "dim", "size"]


def test_overrides() -> None:
    text = overrides_text(candidate(num_ranks=16, fwd_comm=1.0))
    assert text == (
        "sharder=dim batch_size=1024 topology.memory_gib=56 topology.intra_host_gb_per_s=450 "
        "topology.inter_host_gb_per_s=50 (2 hosts of 8 ranks)"
    )
    of_question = ["data=t510", "model.dense_arch=[512,64]"]
    text = overrides_text(candidate(num_ranks=16, fwd_comm=1.0), of_question)
    assert text.endswith(" data=t510 'model.dense_arch=[512,64]' (2 hosts of 8 ranks)")


def test_nothing_fits() -> None:
    error = no_outcome([failed(H100, "long text", memory_bytes=1024), failed(A100, "a bug")])
    assert "h100, dim: 3.0 GiB of tables exceed the memory of 8 ranks by 3.0 GiB" in str(error)
    assert str(error).endswith("a100, dim: a bug")
    assert math.isfinite(value_of(candidate(fwd_comm=1.0), "time"))
