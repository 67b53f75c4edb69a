"""What a run leaves for TensorBoard, read back as TensorBoard reads it."""

import dataclasses
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import metadata

from dlrm_sharded.calibration.priors import learned_cost_model
from dlrm_sharded.explain.diagnosis import diagnose
from dlrm_sharded.hardware.context import RunContext
from dlrm_sharded.plans.plan import Shard, ShardingPlan
from dlrm_sharded.plans.plan_cost import STAGES
from dlrm_sharded.plans.plan_report import PlanReport
from dlrm_sharded.plans.tables import Table
from dlrm_sharded.plans.task import ShardingTask, Topology
from dlrm_sharded.runs.run_events import RunWriter
from tests.unit.runs.test_result import MEASURED as MEASURED_COST
from tests.unit.runs.test_result import PREDICTED, TRAINING
from tests.unit.runs.test_run_folder import by_stage

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
    assert {f"embedding/{stage}_ms/max" for stage in STAGES} <= found.keys()
    assert set(events.Tags()["images"]) == {"plan/cost_by_rank", "plan/memory_by_rank"}
    for tag in events.Tags()["images"]:
        image = events.Images(tag)[0]
        assert image.encoded_image_string.startswith(b"\x89PNG")
        assert image.width > image.height > 100
    explained = text(events, "plan/explained")
    assert "Rank 0 is the slowest with 10.00 ms" in explained
    assert "| embedding cost | 6.25 | 10.00 | -38 % |" in explained


@pytest.mark.parametrize("alternatives", [False, True])
def test_what_the_cost_model_says_of_the_plan(tmp_path, alternatives):
    model = learned_cost_model(RunContext())
    diagnosis = diagnose(PLAN, model.price(TASK), alternatives=alternatives)
    with RunWriter(tmp_path, enabled=True) as writer:
        writer.plan(PLAN, dataclasses.replace(REPORT, diagnosis=diagnosis), TASK, MEASURED)
    explained = text(read(tmp_path), "plan/explained")
    assert "It is predicted 6.25 ms, at most 25.0 % above the best possible." in explained
    for title in ("Ranks that bound the cost", "Gains of splits"):
        assert f"**{title}**" in explained
    assert ("**Gains of alternatives**" in explained) == alternatives


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


def test_scalars_have_steps(tmp_path):
    with RunWriter(tmp_path, enabled=True) as writer:
        for step in (20, 40):
            writer.scalar("train/loss", 1 / step, step)
    events = read(tmp_path).Scalars("train/loss")
    assert [event.step for event in events] == [20, 40]
    assert [event.value for event in events] == pytest.approx([0.05, 0.025])


def test_a_stall(tmp_path):
    with RunWriter(tmp_path, enabled=True) as writer:
        writer.stall(31.5, 7, "no progress for 32 s")
    events = read(tmp_path)
    (event,) = events.Scalars("train/stalled_s")
    assert (event.step, event.value) == (7, 31.5)
    assert text(events, "train/stall") == "no progress for 32 s"


def test_other_ranks_write_nothing(tmp_path):
    with RunWriter(tmp_path, enabled=False) as writer:
        writer.config("seed: 0", HPARAMS)
        writer.plan(PLAN, REPORT, TASK, MEASURED)
        writer.scalar("train/loss", 0.5, 20)
        writer.stall(31.5, 7, "no progress")
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_fails_keeps_what_it_wrote(tmp_path):
    def run():
        with RunWriter(tmp_path, enabled=True) as writer:
            writer.scalar("train/loss", 0.5, 20)
            raise KeyError

    with pytest.raises(KeyError):
        run()
    assert read(tmp_path).Tags()["scalars"] == ["train/loss"]


@pytest.mark.parametrize("reserved_gib", [None, 0.5], ids=["cpu", "cuda"])
def test_memory_of_a_whole_run(tmp_path, reserved_gib):
    with RunWriter(tmp_path, enabled=True) as writer:
        writer.conclude(dataclasses.replace(TRAINING, reserved_gib=reserved_gib))
    found = {tag for tag in read(tmp_path).Tags()["scalars"] if tag.startswith("memory/")}
    assert found == {"memory/peak_gib/max", *(["memory/reserved_gib/max"] if reserved_gib else [])}
