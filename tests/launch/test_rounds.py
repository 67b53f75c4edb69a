"""Sweeps in rounds: one job trains all combinations, and measures them in turns."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from hydra.core.utils import JobReturn
from omegaconf import OmegaConf
from torch.fx import GraphModule

from dlrm_sharded.model.dense_layers import DenseLayers
from dlrm_sharded.runs.rounds import FILE_NAME, disturbed_rounds, read_rounds, rounds_file
from dlrm_torchx import round_ranks
from dlrm_torchx.jobs import JobState, SweepApp, SweepJob
from dlrm_torchx.mailbox import HydraCall, JobMailbox
from dlrm_torchx.round_order import PROGRESS, RoundsOrder
from tests import preloaded
from tests.conftest import SMALL_RUN
from tests.e2e.runs import result_of
from tests.launch.conftest import LISTENING, jobs_of, states_of
from tests.processes import wait_until

pytestmark = pytest.mark.slow

NUM_ROUNDS = 3
RUNS = ["random_0", "size_1"]
SOUND = {
    **{"round": 0, "place": 0, "embedding_cost_ms": 1.0, "spread": 0.1, "step_ms": 2.0},
    **{"samples_per_s": 3.0, "step_spread": 0.1, "hosts": {"a": 0.5}, "began_s": 1.0},
    **{"core_wait": 0.0, "seconds": 1.0},
}


def command(sweep_dir: Path, *overrides: str) -> list[str]:
    """Arguments of Python for a sweep in rounds of small runs."""
    rounds = [f"hydra.launcher.rounds={NUM_ROUNDS}", "round_steps=4"]
    sweep = ["-m", "dlrm_sharded.train", "-m", f"hydra.sweep.dir={sweep_dir}", *rounds]
    return [*sweep, *SMALL_RUN, *overrides]


def num_lines(sweep_dir: Path) -> int:
    """Number of measurements, without repetitions of rounds that were disturbed."""
    texts = [path.read_text() for path in sweep_dir.glob(f"*/{FILE_NAME}")]
    return sum(text.count('"attempt": 0') for text in texts)


def test_all_runs_are_measured_in_every_round(tmp_path: Path) -> None:
    """One combination that cannot run ends no other one."""
    journal = tmp_path / "journal"
    what = ["sharder=random,size", "trainer.num_epochs=1,0", f"journal={journal}"]
    done = preloaded.run(*command(tmp_path, *what))
    assert done.returncode == 1
    assert states_of(tmp_path) == ["succeeded", "failed"] * 2
    assert jobs_of(tmp_path)[1]["reason"] == "trainer.num_epochs is 0; it must be an integer >= 1"
    [app] = {job["app"] for job in jobs_of(tmp_path)}
    assert app.startswith("local_cwd://")
    measured = [read_rounds(tmp_path / run) for run in ("random_0", "size_2")]
    assert [sorted(rounds) for rounds in measured] == [[0, 1, 2]] * 2
    for number in range(NUM_ROUNDS):
        first, second = (rounds[number] for rounds in measured)
        assert {first.place, second.place} == {0, 1}
        earlier, later = sorted((first, second), key=lambda found: found.place)
        assert earlier.began_s <= later.began_s
    assert all(f"round {number} of {NUM_ROUNDS}" in done.stdout for number in (1, 2, 3))
    said = done.stdout + (tmp_path / "summary.md").read_text()
    kept = NUM_ROUNDS - len(disturbed_rounds(measured)) or NUM_ROUNDS
    assert said.count(f" (n = {kept})") == 6, "over random, of the fastest, and of the cost"
    assert said.count("hydra.launcher.rounds=6 or more would resolve a difference of 2%") == 2
    for run in ("random_0", "size_2"):  # a round changes nothing of the run
        result = result_of(tmp_path / run)
        assert result["steps"] == 12
        assert "round 3: embedding cost" in (tmp_path / run / "train.log").read_text()
        assert (tmp_path / run / "journal.delivered").exists()
    logs = "".join(path.read_text() for path in tmp_path.glob("*/train.log"))
    assert logs.count("training batches before the training") == 1, "all share their data"
    [noted] = journal.glob("*.jsonl")
    assert len(noted.read_text().splitlines()) == 2


def test_a_killed_sweep_in_rounds_is_taken_up(tmp_path: Path) -> None:
    """With one more round; only the measurement that was under way is made twice."""
    sweep = command(tmp_path, "sharder=random,size")
    with subprocess.Popen(
        [*LISTENING, sys.executable, *sweep],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as process:
        last = tmp_path / RUNS[0] / FILE_NAME
        wait_until(last.exists, f"{last} is written")
        os.killpg(process.pid, signal.SIGKILL)
    started = (tmp_path / RUNS[0] / "result.json").stat().st_mtime_ns
    before = num_lines(tmp_path)
    done = preloaded.run(*sweep, f"hydra.launcher.rounds={NUM_ROUNDS + 1}")
    assert done.returncode == 0, done.stderr
    assert states_of(tmp_path) == ["succeeded"] * 2
    assert (tmp_path / RUNS[0] / "result.json").stat().st_mtime_ns == started
    assert [sorted(read_rounds(tmp_path / run)) for run in RUNS] == [[0, 1, 2, 3]] * 2
    assert num_lines(tmp_path) == 2 * (NUM_ROUNDS + 1)
    assert before < 2 * NUM_ROUNDS


def test_a_stopped_sweep_cancels_the_job_of_all_runs(tmp_path):
    """On a cluster it would run on without its driver."""
    box = JobMailbox(tmp_path)
    jobs = [SweepJob(num, f"#{num}", [], OmegaConf.create(), tmp_path, box) for num in range(2)]
    app = SweepApp(jobs, JobMailbox(tmp_path / "rounds"), in_rounds=True)
    app.await_app("slurm://torchx/7", JobState.RUNNING)
    runner = Mock()
    app.cancel(runner)
    runner.cancel.assert_called_once_with("slurm://torchx/7")
    assert {job.state for job in jobs} == {JobState.CANCELLED}


def test_what_is_left_to_measure_and_to_repeat(tmp_path: Path) -> None:
    boxes, folders = [], []
    for number in range(3):
        folder, box = tmp_path / f"run_{number}", tmp_path / f"box_{number}"
        folder.mkdir()
        for done in range(8):
            rounds_file(folder).append({**SOUND, "round": done})
        box.mkdir()
        JobMailbox(box).send_return(JobReturn())
        boxes.append(str(box))
        folders.append(str(folder))
    order = RoundsOrder(tuple(boxes), tuple(folders), 9, 60.0)
    assert sorted(run for _, run in order.unmeasured(8)) == [0, 1, 2]
    assert order.num_unmeasured() == 3
    assert order.begin(tmp_path, 7, attempt=0) == []  # it is measured
    assert not (tmp_path / PROGRESS).exists()
    assert order.begin(tmp_path, 8, attempt=0) == order.unmeasured(8)
    assert (tmp_path / PROGRESS).read_text() == "round 9 of 9, about 3 s left"
    assert order.to_repeat() == []
    disturbed = {**SOUND, "round": 7, "core_wait": 0.9}
    rounds_file(Path(folders[0])).append(disturbed)
    assert order.to_repeat() == [7]
    assert sorted(run for _, run in order.unmeasured(7, attempt=1)) == [0, 1, 2]
    rounds_file(Path(folders[1])).append({**SOUND, "round": 7, "attempt": 1})
    assert sorted(run for _, run in order.unmeasured(7, attempt=1)) == [0, 2]


def test_rounds_need_a_function_that_measures(application: Path, tmp_path: Path) -> None:
    done = preloaded.run(
        *(str(application), "-m", "hydra/launcher=torchx", "hydra.launcher.rounds=2"),
        *(f"+folder={tmp_path}", "+do=succeed", f"hydra.sweep.dir={tmp_path / 'sweep'}"),
        cwd=tmp_path,
    )
    assert done.returncode != 0
    assert "hydra.launcher.rounds needs a config with the key round" in done.stderr + done.stdout


@pytest.mark.parametrize(
    "sweeper", ["hydra.sweeper.max_batch_size=1", "hydra/sweeper=optuna"], ids=["batches", "optuna"]
)
def test_rounds_need_all_combinations_at_once(sweeper, tmp_path):
    """Round 0 of one batch and round 0 of the next would count as a pair."""
    done = preloaded.run(*command(tmp_path, "sharder=choice(random,size)", sweeper), exit_code=2)
    assert "this sweeper works in batches; use hydra/sweeper=basic" in done.stderr


def test_all_combinations_run_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler takes a layer's code for eight shapes, and leaves others as they are."""
    num_compiles = num_calls = 0

    def backend(graph: GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        nonlocal num_compiles
        num_compiles += 1

        def call(*args: Any) -> Any:
            nonlocal num_calls
            num_calls += 1
            return graph(*args)

        return call

    def run(call: HydraCall, rank: int) -> JobReturn:
        width = call.config.model.width
        layer = DenseLayers(width, [2], device=torch.device("cpu"))
        layer.compile(backend=backend)
        layer(torch.zeros(4, width))
        return JobReturn()

    monkeypatch.setattr(HydraCall, "run", run)
    for width in range(2, 14):
        config = OmegaConf.create({"model": {"width": width}})
        mailbox = Mock(receive_call=lambda: HydraCall(run, config, None, None))  # noqa: B023
        for _ in range(2):  # as of two sharders, which share the graph
            round_ranks.run_in_turn(mailbox, 0)
    assert (num_compiles, num_calls) == (12, 24)
