"""A simulated run adds up, says whom ranks wait for, and is drawn and written."""

import csv
import dataclasses
import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from dlrm_sharded.plans.standing import Standing
from dlrm_sharded.simulation.figures import PIXELS, plot_timeline, strips
from dlrm_sharded.simulation.files import write_simulation
from dlrm_sharded.simulation.simulation_text import comparison, details, heading_text, summary
from dlrm_sharded.simulation.store import folder_of
from dlrm_sharded.step.core_sharing import CoreSharing
from dlrm_sharded.step.host_time import LOOP_MS, lookups_prior_ms
from dlrm_sharded.step.parts import PARTS, WAITING
from dlrm_sharded.step.schedule import PIPELINED, SERIAL, Overlap
from dlrm_sharded.step.timeline import COMPUTE, EXCHANGE
from dlrm_sharded.tracing.perfetto import Span
from tests.unit.simulation.made_up import SLOWEST, made_up_run


@pytest.mark.parametrize("overlap", [SERIAL, PIPELINED], ids=["serial", "pipelined"])
def test_parts_sum_to_the_step(overlap: Overlap) -> None:
    run = made_up_run(overlap=overlap)
    assert sum(run.step.breakdown.mean_parts_ms.values()) == pytest.approx(run.step.step_ms)
    assert run.step.step_ms >= 90
    assert run.step.samples_per_s == pytest.approx(1e3 * 512 / run.step.step_ms)
    assert run.origins == {"measured": 1, "scaled": 7}


def test_all_ranks_wait_for_the_slowest() -> None:
    run = made_up_run()
    for rank in range(8):
        wait = run.longest_wait(rank)
        if rank != SLOWEST:
            assert wait is not None
            assert wait.cause == SLOWEST
    waiting = run.step.breakdown.parts_ms[WAITING]
    assert waiting.argmin() == SLOWEST
    [first, *_] = [line for line in details(run) if "ranks wait" in line]
    assert f"for rank {SLOWEST}" in first
    assert f"t{SLOWEST}[0:1000, 0:16]" in first
    assert "90.0 ms" in first
    assert " ms on average, " in first


SLOW_LAUNCH_MS = 500.0


def test_hosts_of_gpus_bound_a_step_that_they_launch_more_slowly() -> None:
    run, bound = made_up_run(launch_ms=1.0), made_up_run(launch_ms=SLOW_LAUNCH_MS)
    host_ms = SLOW_LAUNCH_MS + lookups_prior_ms(1) + LOOP_MS
    assert (run.step.bounding_host, made_up_run().step.host) == (None, None)
    assert run.step.step_ms == made_up_run().step.step_ms
    assert bound.step.step_ms == pytest.approx(host_ms)
    assert bound.step.device_ms == pytest.approx(run.step.step_ms)
    assert bound.step.samples_per_s == pytest.approx(1e3 * 512 / host_ms)
    assert bound.to_json()["host_ms"] == pytest.approx(host_ms)
    assert bound.to_json()["host_source"] == "a prior"
    measured = made_up_run(launch_ms=SLOW_LAUNCH_MS, lookups_host_ms=2.5).to_json()
    assert measured["host_ms"] == pytest.approx(SLOW_LAUNCH_MS + 2.5 + LOOP_MS)
    assert measured["host_source"] == "measured in part"
    assert details(bound)[1].startswith("It is bound by the host: the GPUs need ")
    assert not any("host" in line for line in details(made_up_run()))


def test_sharders_tie_where_the_host_bounds_them() -> None:
    names = ("dim", "size", "random")
    runs = [made_up_run(launch_ms=SLOW_LAUNCH_MS, sharder=name) for name in names[:2]]
    runs.append(made_up_run(launch_ms=1.0, sharder=names[2]))
    text = summary("simulated", [], runs, {})
    [tie] = [line for line in text.splitlines() if "they tie" in line]
    assert tie.startswith("The host bounds the steps of dim, size: whatever their GPUs need, ")
    titles = comparison(runs, {})[0]
    assert "| GPUs ms | host ms |" in titles
    assert "they tie" not in summary("simulated", [], runs[1:], {})
    on_cpus = summary("simulated", [], [made_up_run(), made_up_run()], {})
    assert "they tie" not in on_cpus
    assert "host ms" not in on_cpus


def test_sharders_without_a_plan_have_a_row() -> None:
    lines = comparison([made_up_run()], {"random": "table 'a' | does\nnot fit"})
    assert "no plan: table 'a' / does not fit" in lines[-1]
    assert len({line.count("|") for line in lines}) == 1


def test_a_busy_machine_is_named() -> None:
    run = made_up_run()
    assert not any("busy" in line for line in details(run))
    busy = [dataclasses.replace(times, seconds=10.0, core_wait_s=4.0) for times in run.ranks]
    lines = details(dataclasses.replace(run, ranks=tuple(busy)))
    assert any("40 % of the time" in line for line in lines)


def test_the_heading_tells_measured_from_predicted() -> None:
    task = made_up_run().task
    standing = Standing("prior", "a CPU", error=0.5)
    on = "cpu: X with 1 thread"
    heading = heading_text(task, standing, gpu=None, measured_on=on)
    assert heading.startswith(f"simulated, lookups measured on {on}, one rank")
    assert "predicted (prices of a CPU: prior, within about 50 %)" in heading
    assert "8 ranks on 2 hosts" in heading
    heading = heading_text(task, standing, gpu="a GPU", measured_on=on)
    assert heading.startswith("predicted by the prior of a GPU, nothing was measured: 8 ranks")
    assert heading.endswith("Prices: prior, within about 50 %.")


@pytest.mark.parametrize("overlap", [SERIAL, PIPELINED], ids=["serial", "pipelined"])
@pytest.mark.parametrize("world_size", [6, 8, 64])
def test_timelines_are_drawn(world_size: int, overlap: Overlap) -> None:
    run = made_up_run(world_size, overlap=overlap)
    figure = plot_timeline(run, "simulated, lookups measured on a device")
    timeline, waits = figure.axes
    assert timeline.get_ylim()[0] == len(run.ranks) - 0.5
    assert len(waits.patches) == len(run.ranks)
    [legend] = figure.legends
    assert {text.get_text() for text in legend.get_texts()} >= {"lookups", "dense forward"}


def test_strips_show_computation_over_exchanges() -> None:
    spans = [
        Span(0, EXCHANGE, "e", "fwd_comm", 0.0, 6.0),
        Span(0, COMPUTE, "c", "dense_forward", -3.0, 5.0),
        Span(1, COMPUTE, "c", "fwd_compute", 9.9999, 12.0),
    ]
    picture = strips(spans, 10.0, 2)
    assert picture.shape == (2, PIXELS)
    half = PIXELS // 2
    assert set(picture[0, :half]) == {PARTS.index("dense_forward")}
    assert picture[0, half + 1] == PARTS.index("fwd_comm")
    assert picture[1, 0] == PARTS.index("other")


def test_equal_runs_are_equal_files(tmp_path: Path) -> None:
    for name in ("a", "b"):
        run = made_up_run()
        folder_of(tmp_path / name, run.planned.sharder).mkdir(parents=True)
        write_simulation(
            tmp_path / name,
            heading="simulated",
            notes=["a note"],
            settings={"seed": 0},
            runs=[run],
            failed={"random": "no plan"},
        )
    files = sorted(path.relative_to(tmp_path / "a") for path in (tmp_path / "a").rglob("*.*"))
    assert list(map(str, files)) == [
        *("dim/timeline.png", "dim/trace.json.gz", "ranks.csv", "simulation.json", "summary.md")
    ]
    for file in files:
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
    written = json.loads((tmp_path / "a" / "simulation.json").read_text())
    assert written["sharders"][0]["waits"][0]["cause"] == SLOWEST
    assert written["failed"] == [{"sharder": "random", "message": "no plan"}]
    with (tmp_path / "a" / "ranks.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["host"]) for row in rows] == [0] * 4 + [1] * 4
    parts_ms = [sum(float(row[f"{part}_ms"]) for part in PARTS) for row in rows]
    assert np.allclose(parts_ms, made_up_run().step.step_ms, rtol=1e-3)
    events = json.loads(gzip.decompress((tmp_path / "a/dim/trace.json.gz").read_bytes()))
    assert {event["pid"] for event in events["traceEvents"]} == set(range(8))


def test_folders_of_sharders_are_plain_names(tmp_path: Path) -> None:
    assert folder_of(tmp_path, "neuroshard;pin={a: [0]}").name == "neuroshard_pin=_a_0_"


def test_ranks_that_share_cores_compute_longer() -> None:
    alone, shared = made_up_run(), made_up_run(sharing=CoreSharing(4, ranks_at_once=2))
    for before, after in zip(alone.cost.per_rank, shared.cost.per_rank, strict=True):
        assert before.fwd_compute_ms < after.fwd_compute_ms <= 2 * before.fwd_compute_ms
        assert after.fwd_comm_ms == before.fwd_comm_ms
    assert alone.step.step_ms < shared.step.step_ms < 2 * alone.step.step_ms
