"""Calibrating as a user does: whole, after a kill, and with settings that cannot be used."""

import json
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from dlrm_sharded.calibration.sample_store import SampleStore
from dlrm_sharded.calibration.samples import Sample
from dlrm_sharded.plans.plan_cost import STAGES
from tests import preloaded
from tests.e2e.runs import LAUNCHERS, environment

pytestmark = pytest.mark.slow
CALIBRATE = ("-m", "tests.distributed.small_calibration")


def calibrate(
    folder: Path, *overrides: str, launcher: Sequence[str] = (), exit_code: int = 0
) -> preloaded.Ended:
    """Measure six plans, each of which counts as a second; a fit needs three."""
    words = (f"out={folder}/out", f"journal={folder}/store", "batch_sizes=[66,132]", "minutes=0.1")
    arguments = (*launcher, *CALIBRATE, *words, *overrides)
    return preloaded.run(*arguments, env=environment(), exit_code=exit_code)


def samples_in(folder: Path) -> list[Sample]:
    [path] = folder.glob("store/*.jsonl")
    return list(SampleStore(path).read(None).values())


def assert_sound(samples: Sequence[Sample], computing: int, exchanging: set[int]) -> None:
    """The samples are what they should be."""
    assert {s.world_size for s in samples if s.kind == "computation"} == {computing}
    assert {s.world_size for s in samples if s.kind == "communication"} <= exchanging
    for sample in samples:
        assert len(sample.cost.input_dist_ms) == len(sample.cost.per_rank) == sample.world_size
        assert sample.ranks_per_host == sample.world_size
        assert sample.batch_size in (66, 132)
        assert min(sample.cost.input_dist_ms) > 0
        for stages in sample.cost.per_rank:
            assert all(stages.stage_ms(stage) > 0 for stage in STAGES)
    assert len({str(sample.shards) for sample in samples}) == len(samples)


def test_what_a_kill_leaves_counts(tmp_path: Path) -> None:
    """The next call adds further plans to it, and fits all."""
    ranks = "num_ranks=3"
    words = (f"out={tmp_path}/out", f"journal={tmp_path}/store", "batch_sizes=[66,132]", ranks)
    process = preloaded.start(*CALIBRATE, *words, env=environment(), own_process=True)

    def lines() -> list[dict[str, Any]]:
        found = [path.read_bytes() for path in tmp_path.glob("store/*.jsonl")]
        return [json.loads(line) for data in found for line in data.splitlines(keepends=True)[:-1]]

    while len(lines()) < 3:
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.005)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    before = lines()
    assert not (tmp_path / "out").exists()
    [path] = tmp_path.glob("store/*.jsonl")
    with path.open("a") as file:
        file.write('{"optimizer": "rowwise_adagrad", "run": {"kind": "computa')

    output = calibrate(tmp_path, ranks).output
    samples = samples_in(tmp_path)
    assert [sample.number for sample in samples] == list(range(len(samples)))
    assert len(samples) > len(before)
    assert_sound(samples, samples[0].world_size, {2, 3})
    for sample, line in zip(samples, before, strict=False):
        assert [rank.to_json() for rank in sample.cost.per_rank] == [
            {key: time_ms for key, time_ms in rank.items() if key != "input_dist_ms"}
            for rank in line["run"]["per_rank"]
        ]
    assert [path.name.split("-")[0] for path in (tmp_path / "out").iterdir()] == ["prices"]
    assert "plan, critical path" in output
    assert f"fitted {len(samples)} samples" in output
    assert "FutureWarning" not in output
    assert "Traceback" not in output


def test_one_rank_of_torchrun_computes(tmp_path: Path) -> None:
    calibrate(tmp_path, launcher=[*LAUNCHERS["torchrun"], "1"])
    assert_sound(samples_in(tmp_path), 1, set())


def test_a_bad_setting_is_said_once_before_ranks_start(tmp_path: Path) -> None:
    output = calibrate(tmp_path, "minutes=-5", exit_code=2).output
    assert output.count("error: ") == 1
    assert "minutes is -5; it must be a number > 0" in output
    assert list(tmp_path.iterdir()) == []


def test_what_the_ranks_find_wrong_is_said_once(tmp_path: Path) -> None:
    (tmp_path / "store").write_text("a file in the place of the folder")
    output = calibrate(tmp_path, "num_ranks=2", exit_code=2).output
    assert output.count("error: ") == 1
    assert "cannot be written; give another journal" in output
