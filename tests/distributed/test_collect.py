"""Collecting costs as a user does: whole, after a kill, and with settings that cannot be used."""

import json
import os
import signal
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from dlrm_sharded.calibration.collect import CollectConfig
from dlrm_sharded.calibration.costs_file import read_costs
from dlrm_sharded.calibration.samples import CollectedCosts, Sample
from dlrm_sharded.calibration.schedule import schedule
from dlrm_sharded.commands.calibrate import SHORT_REPEAT_EVERY
from dlrm_sharded.files.json_files import write_json
from dlrm_sharded.plans.layouts import row_blocks
from dlrm_sharded.plans.plan_cost import STAGES
from tests import preloaded
from tests.e2e.runs import LAUNCHERS, environment

pytestmark = pytest.mark.slow
NUM_SAMPLES = 10
TINY = [
    f"collect.num_samples={NUM_SAMPLES}",
    *("collect.table_gib=0.01", "collect.ids_per_step=2000", "collect.batch_sizes=[66,132]"),
    "fit=null",
]
COLLECT = ("-m", "dlrm_sharded.commands.calibrate")


def collect(
    out: Path, *overrides: str, launcher: Sequence[str] = (), exit_code: int = 0
) -> preloaded.Ended:
    """Measure into a file, whose folder the command is given."""
    arguments = (*launcher, *COLLECT, f"out={out.parent}", *TINY, *overrides)
    return preloaded.run(*arguments, env=environment(), exit_code=exit_code)


def assert_whole(collected: CollectedCosts, computing: int, communicating: list[int]) -> None:
    """All that was scheduled is there, and is what it should be."""
    planned = schedule(
        NUM_SAMPLES,
        computing,
        communicating,
        repeat_every=SHORT_REPEAT_EVERY,
        num_repeats=CollectConfig().num_repeats,
    )
    assert Counter((s.number, s.attempt, s.kind, s.world_size) for s in collected.samples) == (
        Counter((s.number, s.attempt, s.kind, s.world_size) for s in planned)
    )
    for sample in collected.samples:
        assert len(sample.cost.input_dist_ms) == len(sample.cost.per_rank) == sample.world_size
        assert sample.ranks_per_host == sample.world_size
        assert sample.batch_size in (66, 132)
        assert min(sample.cost.input_dist_ms) > 0
        for stages in sample.cost.per_rank:
            assert all(stages.stage_ms(stage) > 0 for stage in STAGES)
        assert_row_blocks_tile(sample)
    by_plan = {(s.number, s.attempt): (s.batch_size, s.shards) for s in collected.samples}
    for (number, attempt), plan in by_plan.items():
        assert attempt == 0 or plan == by_plan[number, 0]
    assert len({str(plan) for plan in by_plan.values()}) == NUM_SAMPLES


def assert_row_blocks_tile(sample: Sample) -> None:
    """The row blocks follow each other table by table, one on every rank, and even."""
    blocks = [shard for shard in sample.shards if shard.row_wise]
    for i in range(0, len(blocks), sample.world_size):
        table = blocks[i : i + sample.world_size]
        assert [block.rank for block in table] == list(range(sample.world_size))
        num_rows = [block.num_rows for block in table]
        even = row_blocks(sum(num_rows), sample.world_size)
        assert num_rows == [stop - begin for begin, stop in even]
        assert len({(block.num_cols, block.reuse_histogram) for block in table}) == 1


def test_what_a_kill_leaves_is_in_the_file(tmp_path):
    out = tmp_path / "calibration" / "costs.parquet"
    lines = out.with_name("costs.parquet.partial") / "samples.jsonl"
    ranks = "num_ranks=3"
    process = preloaded.start(
        *COLLECT, f"out={out.parent}", *TINY, ranks, env=environment(), own_process=True
    )
    while not lines.exists() or lines.read_bytes().count(b"\n") < 3:
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.005)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    before = [json.loads(line) for line in lines.read_text().splitlines(keepends=True)[:3]]
    assert not out.exists()
    with lines.open("a") as file:
        file.write('{"kind": "computation", "number": 9')

    output = collect(out, ranks).output
    collected = read_costs(out)
    computing = collected.manifest["computation_ranks"]
    assert_whole(collected, computing, [2, 3])
    for i, row in enumerate(before):
        assert [rank.to_json() for rank in collected.samples[i].cost.per_rank] == [
            {key: time_ms for key, time_ms in rank.items() if key != "input_dist_ms"}
            for rank in row["per_rank"]
        ]
    assert sorted(path.name for path in out.parent.iterdir()) == ["costs.json", "costs.parquet"]
    manifest = collected.manifest
    assert manifest["device"] == "cpu"
    hardware = collected.hardware
    assert hardware.name.startswith("cpu: ")
    assert hardware.fingerprint.cpu.threads == manifest["threads"]
    assert hardware.probe.exchange.num_ranks == 3
    assert manifest["batch_sizes"] == [66, 132]
    assert manifest["num_samples"] == len(collected.samples)
    assert {name.split(",")[0] for name in manifest["repeatability"]} == {"computation"}
    assert "FutureWarning" not in output
    assert "Traceback" not in output


def test_one_rank_of_torchrun_computes(tmp_path):
    out = tmp_path / "costs.parquet"
    collect(out, launcher=[*LAUNCHERS["torchrun"], "1"])
    collected = read_costs(out)
    assert_whole(collected, 1, [])


def test_a_bad_setting_is_said_before_ranks_start(tmp_path):
    output = collect(tmp_path / "costs.parquet", "minutes=-5", exit_code=2).output
    assert output.count("error: ") == 1
    assert "minutes is -5, must be a number > 0" in output
    assert list(tmp_path.iterdir()) == []


def test_what_the_ranks_find_wrong_is_said_once(tmp_path):
    unfinished = tmp_path / "costs.parquet.partial"
    unfinished.mkdir()
    write_json(unfinished / "settings.json", {"seed": 1})
    (unfinished / "samples.jsonl").write_text("{}\n")
    output = collect(tmp_path / "costs.parquet", "num_ranks=2", exit_code=2).output
    assert output.count("error: ") == 1
    assert f"{unfinished} is an unfinished collection with other settings" in output
    assert (unfinished / "samples.jsonl").read_text() == "{}\n"
    assert list(tmp_path.iterdir()) == [unfinished]
