"""Runs as a user starts them: torchrun, two gloo ranks, and what they leave behind."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from dlrm_sharded.cost.artifact import write_artifact
from dlrm_sharded.cost.bound import lower_bound_ms
from dlrm_sharded.cost.communication import (
    EXCHANGE_TERMS,
    EXCHANGES,
    LINKS,
    REDUCE_TERMS,
    CommunicationModel,
)
from dlrm_sharded.cost.compute import ComputeModel, PriceNet
from dlrm_sharded.cost.features import EXTENT, PROFILE, WORK_TERMS
from dlrm_sharded.cost.learned import FEATURES, KIND, learned_cost_model, to_arrays
from dlrm_sharded.cost.types import STAGES
from dlrm_sharded.data.criteo_sample import write_criteo_sample
from dlrm_sharded.plan import read_plan, validate
from dlrm_sharded.provenance import device_name
from dlrm_sharded.task import read_task

ROOT = Path(__file__).resolve().parents[2]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
SMALL = ["batch_size=256", "trainer.num_steps=12", "trainer.log_every_steps=4", "data.max_rows=500"]
SCALARS = {
    "embedding/cost_ms",
    "embedding/critical_path_ms",
    "embedding/input_dist_ms",
    "embedding/imbalance",
    *(f"embedding/{stage}_ms/{kind}" for stage in STAGES for kind in ("max", "mean")),
    "plan/solve_s",
    "plan/predicted_ms",
    "plan/lower_bound_ms",
    "plan/gap",
    "predicted/critical_path_ms",
    "predicted/input_dist_ms",
    *(f"predicted/{stage}_ms/max" for stage in STAGES),
    "train/samples_per_s",
    "train/step_ms",
    "train/data_wait_ms",
    "train/loss",
    "eval/auroc",
    "eval/normalized_entropy",
    "memory/peak_gib/max",
}
RESULT_KEYS = {
    "sharder",
    "world_size",
    "device",
    "embedding_cost_ms",
    "critical_path_ms",
    "stages_ms",
    "predicted_ms",
    "predicted_critical_path_ms",
    "predicted_stages_ms",
    "predicted_input_dist_ms",
    "lower_bound_ms",
    "gap",
    "plan_solve_s",
    "samples_per_s",
    "samples_per_s_p10",
    "step_ms",
    "loss",
    "auroc",
    "steps",
    "versions",
    "commit",
    "seed",
}


def train(
    folder: Path, *overrides: str, ranks: int = 2, python_path: Path | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*command(ranks), f"hydra.run.dir={folder}", *overrides],
        cwd=ROOT,
        env=environment() | ({"PYTHONPATH": str(python_path)} if python_path else {}),
        capture_output=True,
        text=True,
        check=False,
        timeout=150,
    )


def command(ranks: int) -> list[str]:
    return [*TORCHRUN, "--nproc-per-node", str(ranks), "-m", "dlrm_sharded.train"]


def environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def result_of(folder: Path) -> dict[str, object]:
    fields: dict[str, object] = json.loads((folder / "result.json").read_text())
    return fields


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cost model of this hardware, made by hand: work has one price, bytes go at 1 GB/s."""
    num_terms = len(WORK_TERMS)

    def net(price_ms: float) -> PriceNet:
        return PriceNet(
            weights=(np.zeros((len(PROFILE), 1)), np.zeros((1, num_terms))),
            biases=(np.zeros(1), np.full(num_terms, math.log(price_ms))),
            cache_gain=np.zeros((num_terms, 1)),
            cache_mb=np.zeros(1),
            cache_slope=np.ones(1),
            launch_ms=0.125,
            next_launch_ms=0.0,
        )

    anything = np.full(len(PROFILE), 100.0)
    compute = ComputeModel(
        0 * anything, np.ones_like(anything), -anything, anything, net(0.001), net(0.002)
    )
    exchange = np.zeros((len(EXCHANGES), len(EXCHANGE_TERMS)))
    exchange[:, EXCHANGE_TERMS.index("max_both_links")] = 1.0
    reduce = np.zeros((len(EXCHANGES), len(REDUCE_TERMS)))
    meta = {
        "kind": KIND,
        "features": FEATURES,
        "hardware": device_name(torch.device("cpu")),
        "device": "cpu",
        "cores": len(os.sched_getaffinity(0)),
        "optimizer": "rowwise_adagrad",
        "ranges": dict.fromkeys(EXTENT, (0.0, 1e12)),
        "measured_links": LINKS,
    }
    arrays = to_arrays(compute, CommunicationModel(exchange, reduce))
    return write_artifact(tmp_path_factory.mktemp("artifacts"), "by_hand", arrays, meta)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory, artifact: Path) -> Path:
    """One finished run that the tests below read."""
    folder = tmp_path_factory.mktemp("runs") / "neuroshard"
    done = train(folder, *SMALL, "seed=3", f"cost_model.artifact={artifact}")
    assert done.returncode == 0, done.stderr
    assert "embedding cost" in done.stderr
    assert done.stderr.count("predicted ") == 3, "after planning, measuring, and in the summary"
    assert "above the best possible" in done.stderr
    assert "the cost model is of" not in done.stderr
    assert "samples/s" in done.stderr
    return folder


def test_result_json(run_dir: Path) -> None:
    result = result_of(run_dir)
    assert set(result) >= RESULT_KEYS
    assert result["sharder"] == "neuroshard"
    assert result["world_size"] == 2
    assert result["steps"] == 12
    assert result["seed"] == 3
    for key in ("embedding_cost_ms", "critical_path_ms", "samples_per_s", "step_ms", "loss"):
        value = result[key]
        assert isinstance(value, float)
        assert math.isfinite(value)
        assert value > 0
    assert set(result["stages_ms"]) == set(STAGES)  # type: ignore[call-overload]


def test_the_cost_is_predicted(run_dir: Path, artifact: Path) -> None:
    """By the named model, of the plan and task that the run leaves behind."""
    plan, task = read_plan(run_dir / "plan.json"), read_task(run_dir / "task.json")
    model = learned_cost_model(
        str(artifact), hardware=device_name(torch.device("cpu")), device="cpu"
    )
    predicted = model.predict(plan, task)
    assert plan.predicted == predicted
    result = result_of(run_dir)
    assert result["predicted_ms"] == predicted.cost_ms
    assert result["predicted_critical_path_ms"] == predicted.critical_path_ms
    assert result["predicted_stages_ms"] == {
        stage: predicted.stage_max_ms(stage) for stage in STAGES
    }
    assert result["predicted_input_dist_ms"] == max(model.predict_input_dist_ms(plan, task))
    assert result["lower_bound_ms"] == plan.lower_bound_ms == lower_bound_ms(task, model)
    assert result["gap"] == plan.gap == predicted.cost_ms / lower_bound_ms(task, model) - 1
    (event_file,) = run_dir.glob("events.out.tfevents.*")
    events = EventAccumulator(str(event_file))
    events.Reload()
    shown = {tag: events.Scalars(f"plan/{tag}")[0].value for tag in ("predicted_ms", "gap")}
    assert shown == pytest.approx({"predicted_ms": predicted.cost_ms, "gap": plan.gap}, rel=1e-5)
    (explained,) = events.Tensors("plan/explained/text_summary")
    text = explained.tensor_proto.string_val[0].decode()
    assert f"slowest rank's {predicted.cost_ms:.2f} ms" in text
    assert "- one more rank: " in text


def test_runs_without_a_cost_model(tmp_path: Path) -> None:
    """Nothing is predicted, and nothing else changes."""
    done = train(tmp_path, *SMALL, "sharder=size_lookup", "cost_model=none")
    assert done.returncode == 0, done.stderr
    assert "predicted" not in done.stderr
    result = result_of(tmp_path)
    assert set(result) >= RESULT_KEYS
    about = ("predicted", "lower_bound_ms", "gap")
    predicted = {key: value for key, value in result.items() if key.startswith(about)}
    assert len(predicted) == 6
    assert set(predicted.values()) == {None}
    assert read_plan(tmp_path / "plan.json").predicted is None


@pytest.mark.parametrize("damage", ["truncated", "missing"])
def test_a_damaged_cost_model(damage: str, artifact: Path, tmp_path: Path) -> None:
    """One message and exit code 2 before anything is planned."""
    copy = tmp_path / artifact.name
    weights = artifact.with_suffix(".safetensors").read_bytes()
    copy.write_text(artifact.read_text())
    if damage == "truncated":
        copy.with_suffix(".safetensors").write_bytes(weights[: len(weights) // 2])
    done = train(tmp_path / "run", *SMALL, f"cost_model.artifact={copy}")
    assert done.returncode == 1  # torchrun's own; it names the ranks' below
    ours = done.stderr.split("Traceback")[0]
    assert ours.count("error: ") == 1, done.stderr
    assert str(copy.with_suffix("")) in ours
    assert "make calibrate" in ours
    assert "exitcode  : 2" in done.stderr
    assert "exitcode  : 1 " not in done.stderr
    left = {path.name.split(".")[0] for path in (tmp_path / "run").rglob("*") if path.is_file()}
    assert left <= {"config", "hydra", "overrides", "train"}


def test_plan_json(run_dir: Path) -> None:
    task = read_task(run_dir / "task.json")
    validate(read_plan(run_dir / "plan.json"), task)
    assert all(table.reuse_histogram is not None for table in task.tables)
    assert task.topology.optimizer_bytes_per_row == 4


def test_event_file(run_dir: Path) -> None:
    (event_file,) = run_dir.glob("events.out.tfevents.*")
    events = EventAccumulator(str(event_file))
    events.Reload()
    tags = events.Tags()
    assert set(tags["scalars"]) >= SCALARS
    assert set(tags["images"]) == {"plan/cost_by_rank", "plan/memory_by_rank"}
    assert {"plan/explained/text_summary", "config/text_summary"} <= set(tags["tensors"])
    assert [event.step for event in events.Scalars("train/loss")] == [4, 8, 12]
    result = result_of(run_dir)
    cost_ms = events.Scalars("embedding/cost_ms")[0].value
    assert cost_ms == pytest.approx(result["embedding_cost_ms"], rel=1e-5)
    assert events.summary_metadata["_hparams_/session_start_info"].plugin_data.plugin_name


def test_only_rank_zero_writes(run_dir: Path) -> None:
    names = {path.name.split(".tfevents")[0] for path in run_dir.iterdir()}
    assert names == {
        ".hydra",
        "events.out",
        "plan.json",
        "result.json",
        "task.json",
        "train.log",
    }


def test_seed_and_not_plan_decides_the_loss(run_dir: Path, tmp_path: Path) -> None:
    """Other plans start from the same weights and see the same batches.

    Equal up to the order of sums, as no table is split; at SGD's smooth steps, so that it stays so.
    """
    sgd = ["optimizer=sgd", "optimizer.embedding_learning_rate=0.01"]
    losses = []
    for sharder in ("dim", "random"):
        done = train(tmp_path / sharder, *SMALL, *sgd, "seed=3", f"sharder={sharder}")
        assert done.returncode == 0, done.stderr
        losses.append(result_of(tmp_path / sharder)["loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    assert read_plan(tmp_path / "dim/plan.json") != read_plan(tmp_path / "random/plan.json")


def test_trains_again_from_its_plan_file(run_dir: Path, tmp_path: Path) -> None:
    plan = ["sharder=plan_file", f"sharder.path={run_dir / 'plan.json'}"]
    done = train(tmp_path, *SMALL, *plan, "trainer.pipeline=sparse_dist")
    assert done.returncode == 0, done.stderr
    assert read_plan(tmp_path / "plan.json").shards == read_plan(run_dir / "plan.json").shards
    wrong = train(tmp_path / "wrong", *SMALL, *plan, ranks=1)
    assert "the plan is for 2 ranks, the job has 1" in wrong.stderr


def test_pipelines_train_alike(tmp_path: Path) -> None:
    losses = []
    for pipeline in ("base", "sparse_dist"):
        done = train(
            tmp_path / pipeline,
            *SMALL,
            f"trainer.pipeline={pipeline}",
            "trainer.eval_every_steps=5",
        )
        assert done.returncode == 0, done.stderr
        losses.append(result_of(tmp_path / pipeline)["loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_learns_from_criteo_files(tmp_path: Path) -> None:
    """From a TSV to an AUROC that chance does not give."""
    write_criteo_sample(tmp_path / "train.txt", num_rows=30_000, seed=1)
    done = train(
        tmp_path / "run",
        "data=criteo_kaggle",
        f"data.source.files=[{tmp_path / 'train.txt'}]",
        f"data.blocks_dir={tmp_path / 'blocks'}",
        "batch_size=512",
        "data.embedding_dim=8",
    )
    assert done.returncode == 0, done.stderr
    assert "samples for training" in done.stderr  # rank 0 converts, and says so
    auroc = result_of(tmp_path / "run")["auroc"]
    assert isinstance(auroc, float)
    assert auroc > 0.6


BAD_INPUT = {
    "sharder": (["sharder=nope"], ["nope", "size_lookup", "torchrec"]),
    "key": (["trainer.num_stepz=3"], ["num_stepz"]),
    "huge_table": (["topology.memory_gib=0.0001"], ["no plan can fit", "topology.memory_gib"]),
    "no_tables": (["data.tables._target_=builtins.tuple"], ["data.tables has no tables"]),
    "batch_size": (["batch_size=255"], ["batch_size is 255", "2 ranks"]),
    "plan_file": (["sharder=plan_file", "sharder.path=none.json"], ["plan file none.json"]),
    "data_file": (
        ["data=criteo_kaggle", "data.source.files=[none.txt]", "data.blocks_dir=none"],
        ["none.txt"],
    ),
    "nan": (
        ["optimizer.dense_learning_rate=1e30", "optimizer=sgd", "trainer.log_every_steps=4"],
        ["the loss is", "at step"],
    ),
    "model": (["model.over_layers=[8]"], ["model.over_layers"]),
    "experiment": (["experiment=nope"], ["nope", "mlperf_dcnv2"]),
    "kind": (["trainer.num_steps=abc"], ["trainer.num_steps is 'abc'", "integer"]),
    "null": (["sharder=null"], ["must be a string or a list"]),
    "ids": (["data._target_=ids.OutOfRange"], ["table 't000' has rows 0 to", "ids"]),
    "adam_on_cpu": (["optimizer=adam"], ["CUDA only"]),
}


@pytest.mark.parametrize("name", BAD_INPUT)
def test_bad_input(name: str, tmp_path: Path) -> None:
    """One message, from one rank; the ranks end with 2; nothing that looks like a result."""
    overrides, expected = BAD_INPUT[name]
    small = [o for o in SMALL if name not in ("no_tables", "data_file") or "max_rows" not in o]
    done = train(tmp_path / "run", *small, *overrides, python_path=own_dataset(tmp_path))

    assert done.returncode == 1  # torchrun's own; it names the ranks' below
    ours = done.stderr.split("Traceback")[0]  # torchrun's own follows
    assert ours.count("error: ") == 1, done.stderr
    message = ours[ours.index("error: ") :]
    for words in expected:
        assert words in message
    assert "exitcode  : 2" in done.stderr
    assert "exitcode  : 1 " not in done.stderr
    left = {path.name.split(".")[0] for path in (tmp_path / "run").rglob("*") if path.is_file()}
    kept = {"config", "hydra", "overrides", "train"} | (
        {"events", "plan", "task"} if name in ("nan", "ids") else set()
    )
    assert left <= kept


def own_dataset(folder: Path) -> Path:
    """A module of the user's, with a dataset whose ids are out of range."""
    own = folder / "own"
    own.mkdir()
    (own / "ids.py").write_text(
        "from dlrm_sharded.data.synthetic import SyntheticDataset\n"
        "class OutOfRange(SyntheticDataset):\n"
        "    def batch(self, *arguments, **options):\n"
        "        batch = super().batch(*arguments, **options)\n"
        "        batch.sparse_features.values().add_(10**6)\n"
        "        return batch\n"
    )
    return own


def test_leaves_another_run_alone(run_dir: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in run_dir.glob("*.json")}
    done = train(run_dir, *SMALL)
    assert "holds a run already" in done.stderr
    assert {path: path.stat().st_mtime_ns for path in run_dir.glob("*.json")} == before


FAILING_DATASET = """
import os
from dlrm_sharded.data.synthetic import SyntheticDataset
from dlrm_sharded.errors import DataError

class FailingOnRankOne(SyntheticDataset):
    def __init__(self, *arguments, where, **options):
        super().__init__(*arguments, **options)
        self._where = where
        if where == "init":
            self._fail()

    def batch(self, split, index, *, rank, world_size):
        if self._where == "batch" and index > 5:
            self._fail()
        return super().batch(split, index, rank=rank, world_size=world_size)

    def _fail(self):
        if os.environ["RANK"] == "1":
            raise DataError("the file of rank one is cut")
"""


@pytest.mark.parametrize("where", ["init", "batch"])
def test_error_of_one_rank(where: str, tmp_path: Path) -> None:
    """It ends both ranks, long before a collective's timeout, with the message of the one."""
    (tmp_path / "failing.py").write_text(FAILING_DATASET)
    done = train(
        tmp_path / "run",
        *SMALL,
        "data._target_=failing.FailingOnRankOne",
        f"+data.where={where}",
        "data.pregenerate=false",
        python_path=tmp_path,
    )
    assert done.returncode == 1
    ours = done.stderr.split("torch.distributed.elastic")[0]
    assert "error on rank 1: the file of rank one is cut" in done.stderr
    assert ours.count("the file of rank one is cut") == 1
    assert not (tmp_path / "run/result.json").exists()


def test_one_rank_alone(tmp_path: Path) -> None:
    """Without torchrun: one rank, and the exit code is ours."""
    alone = [sys.executable, "-m", "dlrm_sharded.train", f"hydra.run.dir={tmp_path}"]
    options = {"cwd": ROOT, "env": environment(), "capture_output": True, "text": True}
    bad = subprocess.run([*alone, "batch_size=0"], check=False, **options)  # type: ignore[call-overload]
    assert bad.returncode == 2
    assert "batch_size is 0" in bad.stderr
    good = subprocess.run([*alone, *SMALL], check=False, **options)  # type: ignore[call-overload]
    assert good.returncode == 0, good.stderr
    assert result_of(tmp_path)["world_size"] == 1


def test_lost_rank_ends_the_job(tmp_path: Path) -> None:
    """A rank that dies takes the others with it within seconds, not after a timeout."""
    job = subprocess.Popen(
        [*command(2), f"hydra.run.dir={tmp_path}", *SMALL, "trainer.num_steps=100000"],
        cwd=ROOT,
        env=environment(),
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + 100
        while not list(tmp_path.glob("plan.json")):
            assert time.monotonic() < deadline, "the job did not start"
            assert job.poll() is None, "the job ended early"
            time.sleep(0.2)
        workers = _children(job.pid)
        assert len(workers) == 2
        os.kill(workers[1], signal.SIGKILL)
        job.communicate(timeout=60)
        assert job.returncode == 1
        assert not any(Path(f"/proc/{worker}").exists() for worker in workers)
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
            job.communicate()


def _children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(c) for t in tasks for c in (t / "children").read_text().split()]
