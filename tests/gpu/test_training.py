"""Training on the device that it is for: NCCL, kernels on CUDA, the overlapping pipeline."""

from typing import Any

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)

from dlrm_sharded.plans.plan_cost import STAGES
from dlrm_sharded.plans.precision import ExchangePrecision
from dlrm_sharded.plans.table_optimizers import CAN_REPLICATE
from dlrm_sharded.plans.tables import MAX_SHARD_COLUMNS
from dlrm_sharded.plans.task import GIB, read_task
from dlrm_sharded.ranks.devices import column_limit
from dlrm_sharded.ranks.distributed import Rank
from dlrm_sharded.training.pipelines import PIPELINES
from dlrm_sharded.training.trainer_config import TrainerConfig
from tests.distributed.small_model import (
    PLANS,
    make_sharded,
    run_trainer,
    shares,
    train_and_evaluate,
)
from tests.distributed.test_module_kinds import train_sharded as train_modules
from tests.distributed.test_sharded_equals_unsharded import (
    assert_alike,
    train_sharded,
    train_unsharded,
)
from tests.distributed.test_step_choice import BOUNDS
from tests.distributed.test_step_choice import train as change_steps
from tests.e2e.runs import command, events_of, result_of
from tests.gpu.devices import ON_CPU, ON_GPUS, gpus, needs_gpus, results_on, run_on
from tests.preloaded.ranks import environment, finish_all, gathered

TOO_WIDE = MAX_SHARD_COLUMNS["cuda"] + 4
"""Smallest width that FBGEMM's kernels on CUDA refuse."""

ALL_NUMBERS = [pytest.param(n, marks=needs_gpus(n)) for n in (1, 2, max(len(gpus()), 3))]
"""Numbers of ranks: one, two, and all GPUs."""

EMBEDDING_OPTIMIZERS = ("sgd", "rowwise_adagrad", "elementwise_adagrad", "adam")


def can_train(kind: str, embedding: str) -> bool:
    """Return whether a kind of plan has no replicas, or the optimizer can train them."""
    return not kind.startswith("replicas") or embedding in CAN_REPLICATE


CASES = [(kind, name) for kind in PLANS for name in EMBEDDING_OPTIMIZERS if can_train(kind, name)]


def train_under_all_plans(rank: Rank) -> dict[str, Any]:
    return train_sharded(rank, CASES)


@pytest.mark.parametrize(("kind", "embedding"), CASES)
@pytest.mark.parametrize("num_ranks", ALL_NUMBERS)
def test_trains_like_one_cpu_in_fp64(num_ranks, kind, embedding):
    results = results_on("cuda", train_under_all_plans, num_ranks)
    assert "error" not in results, results["error"]
    sharded = results[f"{kind}-{embedding}"]
    assert_alike(sharded, train_unsharded(kind, embedding, num_ranks, sharded["initial"]))


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=needs_gpus(4))])
def test_rows_over_one_of_two_hosts(device):
    cases = [("host_rows", embedding) for embedding in EMBEDDING_OPTIMIZERS]
    results = run_on(device, train_sharded, cases, num_ranks=4, local_world_size=2)
    for embedding in EMBEDDING_OPTIMIZERS:
        sharded = results[f"host_rows-{embedding}"]
        assert_alike(sharded, train_unsharded("host_rows", embedding, 4, sharded["initial"]))
        assert sharded["fused_modules"] == [0, 1]  # rank 0 is on the other host


def losses_of(rank: Rank, variants: dict[str, dict[str, Any]]) -> dict[str, list[float]]:
    """Train and evaluate with each of some options, which have come to the ranks as JSON."""
    for options in variants.values():
        precision = ExchangePrecision.parse(options.get("exchange_precision", "fp32"))
        options["exchange_precision"] = precision
    mine = shares(rank)
    return {
        name: train_and_evaluate(rank, "replicas_and_others", mine, **options)
        for name, options in variants.items()
    }


@pytest.mark.parametrize("device", [ON_CPU, ON_GPUS])
def test_options_that_leave_the_losses(device):
    """The pipelines, with an evaluation after a step; short numbers between ranks; a dense graph,
    which GPUs record and replay with the all-reduce in it; and compiled layers."""
    short = {"cpu": "fp16", "cuda": "bf16"}[device]
    tolerance = {short: 2e-2, "compiled": 1e-4}
    variants = {
        **{name: {"pipeline": name} for name in PIPELINES},
        short: {"pipeline": "sparse_dist", "exchange_precision": short},
        "graph": {"pipeline": "sparse_dist", "dense_graph": True},
    }
    if device == "cuda":
        variants["compiled"] = {"pipeline": "sparse_dist", "compile_mode": "default"}
    losses = run_on(device, losses_of, variants)
    for name, found in losses.items():
        assert found == pytest.approx(losses["base"], rel=tolerance.get(name, 1e-5)), name
    assert len(set(losses["base"])) > 1


@pytest.mark.parametrize("bound", BOUNDS)
@pytest.mark.parametrize("device", [ON_CPU, ON_GPUS])
def test_losses_stay_where_steps_change(device, bound):
    """After the first steps, to a graph or to DDP, to another pipeline and to compiled layers."""
    expected, found = (run_on(device, change_steps, of) for of in (None, bound))
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-4)
    assert found["graphs"] == [True] * (bound == "host")


def contexts_of_all_ranks(rank: Rank) -> list[list[int]]:
    """Run the trainer with its thread that reads ahead; the GPUs on which each rank is."""
    sharded, optimizer = make_sharded(rank, "table_wise", "sgd")
    config = TrainerConfig(num_steps=6, eval_every_steps=3, num_warmup_steps=0)
    run_trainer(rank, sharded, optimizer, config)
    gpus = range(torch.cuda.device_count())
    return gathered(rank, [gpu for gpu in gpus if torch._C._cuda_hasPrimaryContext(gpu)])


@pytest.mark.parametrize("device", [ON_CPU, pytest.param("cuda", marks=needs_gpus(2))])
def test_ranks_take_memory_on_their_own_gpu_only(device):
    """A context takes half a GiB, and GPU 0 would have one of every rank."""
    contexts = run_on(device, contexts_of_all_ranks)
    if device == "cuda":
        assert contexts == [[rank] for rank in range(len(gpus()))]
    else:
        assert not any(contexts)


@pytest.mark.parametrize("optimizer", ["adagrad", "adam"])
@pytest.mark.parametrize(
    "num_ranks",
    [
        pytest.param(None, id="without_torchrun", marks=needs_gpus(1)),
        pytest.param(1, marks=needs_gpus(1)),
        pytest.param(len(gpus()), id="all", marks=needs_gpus(2)),
    ],
)
def test_training_command(num_ranks, optimizer, tmp_path):
    """As a user starts it: on one GPU with and without torchrun, and on all of them."""
    program = ["-m", "dlrm_sharded.train"] if num_ranks is None else command(num_ranks)
    overrides = [
        f"optimizer={optimizer}",
        *("trainer.num_steps=60", "trainer.eval_every_steps=20", "model.bf16=true"),
    ]
    finish_all([*program, f"hydra.run.dir={tmp_path}", *overrides], [environment(gpus())])
    result: Any = result_of(tmp_path)
    world_size = num_ranks or 1
    assert "cpu" not in result["device"]
    assert result["pipeline"] in ("base", "sparse_dist")  # chosen by the first steps, and reported
    assert result["dense_graph"] or result["compile_mode"] == "default"
    assert result["world_size"] == world_size
    assert result["auroc"] > 0.6
    task = read_task(tmp_path / "task.json")
    assert result["peak_gib"] > task.table_bytes / world_size / GIB
    assert result["reserved_gib"] >= result["peak_gib"]
    for stage in STAGES:
        # with nobody to exchange with, an exchange may launch nothing
        assert result["stages_ms"][stage] > 0 or (world_size == 1 and "comm" in stage)
    events = events_of(tmp_path)
    assert [event.step for event in events.Scalars("eval/auroc")] == [20, 40, 60]
    assert [event.step for event in events.Scalars("train/data_wait_ms")] == [20, 40, 60]


def look_up(rank: Rank, widths: list[int]) -> list[str]:
    """Look ids up in a table of each width, backward too; errors of those that are refused."""
    on_gpu = rank.device.type == "cuda"
    location = EmbeddingLocation.DEVICE if on_gpu else EmbeddingLocation.HOST
    compute_device = ComputeDevice.CUDA if on_gpu else ComputeDevice.CPU
    ids, offsets = (torch.tensor(values, device=rank.device) for values in ([3, 3, 5], [0, 2, 3]))
    errors = []
    for width in widths:
        table = SplitTableBatchedEmbeddingBagsCodegen(
            [(8, width, location, compute_device)],
            optimizer=EmbOptimType.EXACT_SGD,
            learning_rate=1.0,
            device=rank.device,
        )
        [weights] = table.split_embedding_weights()
        weights.fill_(1.0)
        try:
            pooled = table(ids, offsets)
            pooled.sum().backward()
        except RuntimeError as error:
            errors.append(str(error))
        else:
            assert pooled[:, -1].tolist() == [2.0, 1.0]
            assert weights[:, -1].tolist() == [1, 1, 1, -1, 1, 0, 1, 1]
            errors.append("")
    return errors


@pytest.mark.parametrize("device", [ON_CPU, ON_GPUS])
def test_widest_shard_of_the_kernels(device):
    narrow, wide = run_on(
        device, look_up, [column_limit("cuda") or MAX_SHARD_COLUMNS["cuda"], TOO_WIDE], num_ranks=1
    )
    assert narrow == ""
    assert (wide != "") == (device == "cuda")


SEQUENCES = [("sequences", "dim"), ("sequences", "rows")]


def train_sequences(rank: Rank) -> dict[str, Any]:
    return train_modules(rank, SEQUENCES)


@pytest.mark.parametrize(("kind", "name"), SEQUENCES)
@pytest.mark.parametrize("num_ranks", ALL_NUMBERS)
def test_sequences_train_like_one_cpu(num_ranks: int, kind: str, name: str) -> None:
    found = results_on("cuda", train_sequences, num_ranks)
    assert "error" not in found, found["error"]
    result = found[f"{kind}-{name}"]
    assert result["lies"] == result["planned"]
    assert result["least_change"] > 1e-3
    assert max(result["output_error"], result["error"]) < 1e-4
