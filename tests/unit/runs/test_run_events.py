"""What a run leaves for TensorBoard, read back as TensorBoard reads it.

A file goes on where a checkpoint was taken, and a full disk does not end a run.
"""

import contextlib
import dataclasses
import errno
from pathlib import Path
from unittest.mock import Mock

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import metadata

from dlrm_sharded.calibration.priors import learned_cost_model
from dlrm_sharded.explain.diagnosis import diagnose
from dlrm_sharded.files.errors import LostFolderError
from dlrm_sharded.hardware.context import RunContext
from dlrm_sharded.plans.plan import Shard, ShardingPlan
from dlrm_sharded.plans.plan_report import PlanReport
from dlrm_sharded.plans.tables import Table
from dlrm_sharded.plans.task import ShardingTask, Topology
from dlrm_sharded.runs.run_events import EventFile, RunWriter
from tests.unit.runs.test_result import MEASURED as MEASURED_COST
from tests.unit.runs.test_result import PREDICTED, TRAINING, by_stage

TABLES = (Table("a", 1000, 16, 2.0), Table("b", 500, 8, 1.0))
TASK = ShardingTask(TABLES, Topology(2, 10**7), batch_size=64)
PLAN = ShardingPlan(2, (Shard.whole(TABLES[0], 0), Shard.whole(TABLES[1], 1)))
REPORT = PlanReport("test", solve_s=0.25, cost=PREDICTED, lower_bound_ms=5.0)
MEASURED = MEASURED_COST.cost
SCALARS = {
    "embedding/cost_ms": 10.0,
    "embedding/critical_path_ms": 14.0,
    "embedding/input_dist_ms": 0.75,
    "embedding/imbalance": 10 / 9.5,
    **by_stage(4.0, 3.0, 3.0, 4.0, "embedding/{}_ms/max"),
    **by_stage(2.5, 2.5, 2.5, 2.0, "embedding/{}_ms/mean"),
    "plan/solve_s": 0.25,
    "plan/predicted_ms": 6.25,
    "plan/lower_bound_ms": 5.0,
    "plan/gap": 0.25,
    "predicted/critical_path_ms": 7.75,
    **by_stage(1.5, 2.5, 2.0, 1.75, "predicted/{}_ms/max"),
    "predicted/input_dist_ms": 0.625,
}
HPARAMS = {"sharder": "dim", "data": "synthetic", "batch_size": "64"}


def read(run_dir: Path) -> EventAccumulator:
    events = EventAccumulator(str(run_dir))
    events.Reload()
    return events


def text(events: EventAccumulator, tag: str) -> str:
    (event,) = events.Tensors(f"{tag}/text_summary")
    return str(event.tensor_proto.string_val[0].decode())


def test_the_plan_and_its_cost(tmp_path):
    with RunWriter(tmp_path, enabled=True) as writer:
        writer.plan(PLAN, REPORT, TASK, MEASURED)
    events = read(tmp_path)
    found = {tag: events.Scalars(tag)[0].value for tag in events.Tags()["scalars"]}
    assert found == pytest.approx(SCALARS)
    assert set(events.Tags()["images"]) == {"plan/cost_by_rank", "plan/memory_by_rank"}
    for tag in events.Tags()["images"]:
        image = events.Images(tag)[0]
        assert image.encoded_image_string.startswith(b"\x89PNG")
        assert image.width > image.height > 100
    explained = text(events, "plan/explained")
    assert "Rank 0 is the slowest with 10.00 ms" in explained
    assert "| embedding cost | 6.25 | 10.00 | -38 % |" in explained


def test_what_the_cost_model_says_of_the_plan(tmp_path):
    model = learned_cost_model(RunContext())
    diagnosis = diagnose(PLAN, model.cost_task(TASK), alternatives=True)
    with RunWriter(tmp_path, enabled=True) as writer:
        writer.plan(PLAN, dataclasses.replace(REPORT, diagnosis=diagnosis), TASK, MEASURED)
    explained = text(read(tmp_path), "plan/explained")
    assert "It is predicted 6.25 ms, at most 25.0 % above the lower bound." in explained
    for title in ("Ranks that bound the cost", "Gains of splits", "Gains of alternatives"):
        assert f"**{title}**" in explained


def test_config_and_hparams_are_in_the_runs_file(tmp_path):
    with RunWriter(tmp_path, enabled=True) as writer:
        writer.config("seed: 0\ndata:\n  alpha: 0.9\n", HPARAMS)
        writer.scalar("train/loss", 0.5, 20)
    assert len(list(tmp_path.rglob("events.out.tfevents.*"))) == 1
    events = read(tmp_path)
    # Indented by four, Markdown shows it as it stands.
    assert text(events, "config").splitlines() == ["    seed: 0", "    data:", "      alpha: 0.9"]
    content = events.PluginTagToContent(metadata.PLUGIN_NAME)[metadata.SESSION_START_INFO_TAG]
    session = metadata.parse_session_start_info_plugin_data(content)
    assert {key: value.string_value for key, value in session.hparams.items()} == HPARAMS
    assert session.group_name, "TensorBoard groups trials by it"


def test_other_ranks_write_nothing(tmp_path):
    with RunWriter(tmp_path, enabled=False) as writer:
        writer.config("seed: 0", HPARAMS)
        writer.plan(PLAN, REPORT, TASK, MEASURED)
        writer.scalar("train/loss", 0.5, 20)
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_fails_keeps_what_it_wrote(tmp_path):
    with contextlib.suppress(KeyError), RunWriter(tmp_path, enabled=True) as writer:
        writer.scalar("train/loss", 31.5, 7)
        raise KeyError
    (event,) = read(tmp_path).Scalars("train/loss")
    assert (event.step, event.value) == (7, 31.5)


@pytest.mark.parametrize("reserved_gib", [None, 0.5], ids=["cpu", "cuda"])
def test_memory_of_a_whole_run(tmp_path, reserved_gib):
    with RunWriter(tmp_path, enabled=True) as writer:
        writer.conclude(dataclasses.replace(TRAINING, reserved_gib=reserved_gib))
    found = {tag for tag in read(tmp_path).Tags()["scalars"] if tag.startswith("memory/")}
    assert found == {"memory/peak_gib/max", *(["memory/reserved_gib/max"] if reserved_gib else [])}


def scalars(folder: Path) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in read(folder).Scalars("loss")]


def test_goes_on_at_a_position(tmp_path):
    """What was written after the position is dropped, even half an event."""
    first = EventFile(tmp_path)
    first.scalar("loss", 3.0, 1)
    position = first.position()
    first.scalar("loss", 9.0, 2)
    first.position()
    with (tmp_path / position[0]).open("ab") as file:
        file.write(b"half an ev")
    second = EventFile(tmp_path, going_on=position)
    second.scalar("loss", 2.0, 2)
    second.position()
    assert scalars(tmp_path) == [(1, 3.0), (2, 2.0)]


def test_full_disk_is_one_warning(tmp_path, monkeypatch, caplog):
    file = EventFile(tmp_path)
    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(Path, "open", Mock(side_effect=full))
    for step in range(3):
        file.scalar("loss", 1.0, step)
    file.position()
    (warning,) = caplog.messages
    assert "No space left on device" in warning


def test_nothing_is_written_over_the_events_of_another_job(tmp_path, caplog):
    """It went on with the file while this one was stopped, which then writes nothing more."""
    owners = ["this job"]

    def check_owner() -> None:
        if owners != ["this job"]:
            raise LostFolderError("another job has taken over")

    first = EventFile(tmp_path, check_owner=check_owner)
    first.scalar("loss", 3.0, 1)
    position = first.position()
    first.scalar("loss", 9.0, 2)
    owners.append("another job")
    second = EventFile(tmp_path, going_on=position)
    second.scalar("loss", 2.0, 2)
    second.position()
    first.position()
    assert scalars(tmp_path) == [(1, 3.0), (2, 2.0)]
    [warning] = caplog.messages
    assert warning.endswith("another job has taken over")


def test_two_jobs_append(tmp_path):
    """If the one learns of the other too late, it costs no event of either."""
    first = EventFile(tmp_path)
    first.scalar("loss", 3.0, 1)
    second = EventFile(tmp_path, going_on=first.position())
    first.scalar("loss", 4.0, 2)
    second.scalar("loss", 2.0, 2)
    second.position()
    first.position()
    assert scalars(tmp_path) == [(1, 3.0), (2, 2.0), (2, 4.0)]
