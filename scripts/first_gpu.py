"""Run what a kind of GPU is to be tested with first, and keep the figures of every case.

python scripts/first_gpu.py --out OUT                          all parts, 14 minutes on one GPU
python scripts/first_gpu.py --out OUT --parts kernels,mlperf   some of them
python scripts/first_gpu.py --out OUT --limit-s 540            at most so long; parts share the time
python scripts/first_gpu.py --out OUT --small                  a rehearsal, also on a CPU

Each part runs in a process of its own, within a limit of its own. OUT/results.jsonl gets a line for
each case as it ends, and one for each part; OUT/PART.log has what the part printed.
docs/notes/first_gpu.md says what the parts find out. The exit code is 1 if a part failed.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gzip
import itertools
import json
import math
import os
import signal
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import profile
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.types import EmbeddingModuleShardingPlan
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import models
from dlrm_sharded import Planner, RunContext, learned_cost_model, make_sharder
from dlrm_sharded.accesses.profiles import with_profiles
from dlrm_sharded.contest.plan_measurements import measure_plans
from dlrm_sharded.datasets.presets import mlperf_dcnv2
from dlrm_sharded.files.provenance import commit, versions
from dlrm_sharded.hardware.detect import local_hardware
from dlrm_sharded.measuring.measure import MeasureConfig
from dlrm_sharded.measuring.rank_bench import RankBench, draw_ids
from dlrm_sharded.model.fused_optimizers import FUSED_EPSILON, fuse
from dlrm_sharded.model.torchrec_adapter import bag_configs, parameter_sharding, sharding_env
from dlrm_sharded.plans.layouts import ColumnShards
from dlrm_sharded.plans.plan import Shard
from dlrm_sharded.plans.plan_cost import COMPUTE_STAGES
from dlrm_sharded.plans.tables import MAX_SHARD_COLUMNS, Table
from dlrm_sharded.plans.task import GIB, ShardingTask, Topology
from dlrm_sharded.ranks.devices import column_limit
from dlrm_sharded.ranks.distributed import Rank, process_group
from dlrm_sharded.ranks.gpus import nvidia_smi
from dlrm_sharded.ranks.process import die_with_parent
from dlrm_sharded.ranks.stopwatch import Stopwatch
from dlrm_sharded.training.pipeline import make_pipeline
from dlrm_sharded.training.prefetch import Prefetcher

ROOT = Path(__file__).resolve().parents[1]
RESULTS = "results.jsonl"
GPU_STATE = (
    "name,driver_version,memory.used,clocks.sm,clocks.mem,clocks_event_reasons.active,"
    "power.draw,power.limit,temperature.gpu,utilization.gpu"
)
LAST = 2000
"""Number of last characters of an output that are kept."""


@dataclass(frozen=True, slots=True)
class Part:
    """One part of the script while it runs.

    Args:
        ends_at: time of `time.monotonic` at which the part is killed.
    """

    name: str
    out: Path
    small: bool
    ends_at: float
    errors: list[str] = field(default_factory=list)

    @property
    def seconds_left(self) -> float:
        return self.ends_at - time.monotonic()

    @property
    def device(self) -> torch.device:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def record(self, case: str, **figures: Any) -> None:
        """Append the figures of a case to the results; "error" among them is a failure."""
        self.errors.extend([figures["error"]] if "error" in figures else [])
        line = {"part": self.name, "case": case, **figures}
        with (self.out / RESULTS).open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(line, flush=True)

    def run_cases(
        self, cases: Mapping[str, Callable[[], dict[str, Any]]], *, seconds: float
    ) -> None:
        """Record the figures of each case; a case that fails does not end the others.

        Args:
            seconds: time that a case needs, without which it does not begin.
        """
        for name, work in cases.items():
            if self.seconds_left < seconds:
                self.record(name, error=f"no time: {self.seconds_left:.0f} s are left")
                continue
            started = time.monotonic()
            try:
                figures = work()
            except Exception as error:
                traceback.print_exc()
                figures = {"error": f"{type(error).__name__}: {error}"[:LAST]}
            self.record(name, seconds=round(time.monotonic() - started, 1), **figures)


def environment(part: Part) -> None:
    """Find out versions, whether the installation works, and how fast the device is."""
    command = [sys.executable, "-m", "dlrm_sharded.commands.check_install"]
    done = subprocess.run(command, capture_output=True, text=True)
    error = {"error": f"exit code {done.returncode}"} if done.returncode else {}
    part.record("dlrm-check-install", output=(done.stdout + done.stderr)[-LAST:], **error)
    part.record("versions", **versions(), cuda=torch.version.cuda, cores=os.cpu_count())
    if part.device.type == "cpu" and not part.small:
        raise RuntimeError("torch finds no GPU; --small rehearses on a CPU")
    hardware = local_hardware(part.device)
    assert hardware.probe is not None
    part.record("probe", hardware=hardware.name, **hardware.probe.to_json())
    size = 256 if part.small else 8192
    factor = torch.ones(size, size, dtype=torch.bfloat16, device=part.device)
    product_ms = mean_ms(lambda: factor @ factor, part.device)
    part.record("bf16 products", tflop_per_s=2 * size**3 / product_ms / 1e9)
    if part.device.type == "cuda":
        batch = torch.ones(2**28).pin_memory()
        copy_ms = mean_ms(lambda: batch.to(part.device, non_blocking=True), part.device)
        part.record("page-locked copies", gb_per_s=batch.nbytes / copy_ms / 1e6)


def mean_ms(work: Callable[[], object], device: torch.device, repeats: int = 10) -> float:
    """Return the mean time of work that is launched several times in a row."""
    work()
    watch = Stopwatch(device)
    watch.mark()
    for _ in range(repeats):
        work()
    watch.mark()
    return watch.intervals_ms()[0] / repeats


WIDTHS = (4, 8, 12, 20, 36, 60, 100, 128, 132, 256, 516, 1024, 2048)
GROUPS = {"all widths": WIDTHS, "up to 128 columns": WIDTHS[:8], "up to 32 columns": WIDTHS[:4]}
"""Tables that share a lookup, whose kernel FBGEMM chooses by the widest of them."""

MAX_ERROR = {"sgd": 1e-4, "rowwise_adagrad": 1e-4, "elementwise_adagrad": 2e-2, "adam": 2e-2}
"""Largest error of new weights. The last two divide gradients by their size, so that rounding
decides on the few weights whose gradients nearly cancel; a wrong number of steps of Adam would be
an error of 0.2."""

MAX_LOOKUP_ERROR = 1e-5
TABLE_LEARNING_RATE = 0.1


class Adam(torch.optim.SparseAdam):
    """Adam by its definition, which adds eps after the bias is corrected, unlike torch's."""

    def step(self, closure: Any = None) -> Any:
        [group] = self.param_groups
        num_steps = self.state[group["params"][0]].get("step", 0) + 1
        group["eps"] = 1e-8 * math.sqrt(1 - group["betas"][1] ** num_steps)
        return super().step(closure)


UPDATES: dict[str, Any] = {
    "sgd": torch.optim.SGD,
    "rowwise_adagrad": RowWiseAdagrad,
    "elementwise_adagrad": functools.partial(torch.optim.Adagrad, eps=FUSED_EPSILON),
    "adam": Adam,
}


def kernels(part: Part) -> None:
    """Compare FBGEMM's lookups and fused optimizers with their definitions in fp64."""
    optimizers = [name for name in UPDATES if name != "adam" or part.device.type == "cuda"]
    cases = {
        f"{optimizer}, {group}": functools.partial(kernel_errors, part, optimizer, widths)
        for optimizer in optimizers
        for group, widths in GROUPS.items()
    }
    with process_group():
        part.run_cases(cases, seconds=2)


def kernel_errors(part: Part, optimizer: str, widths: Sequence[int]) -> dict[str, Any]:
    """Return the largest errors of lookups and of weights after two steps.

    An error is relative to the largest number of the definition, or to the largest change.
    """
    num_rows, batch_size = (300, 32) if part.small else (10_000, 1024)
    most = column_limit(part.device.type) or MAX_SHARD_COLUMNS[part.device.type]
    allowed = [width for width in widths if width <= most]
    tables = [Table(f"d{width}", num_rows, width, 5.5) for width in allowed]
    module = one_rank_module(tables, optimizer, part.device)
    weights = {
        name.split(".")[-2]: sharded.local_shards()[0].tensor
        for name, sharded in module.state_dict().items()
    }
    rng = torch.Generator().manual_seed(0)
    exact = {}
    for name, weight in weights.items():
        weight.copy_(torch.randn(weight.shape, generator=rng))
        exact[name] = torch.nn.EmbeddingBag.from_pretrained(
            weight.cpu().double(), freeze=False, mode="sum", sparse=optimizer == "adam"
        )
    start = {name: table.weight.detach().clone() for name, table in exact.items()}
    parameters = [table.weight for table in exact.values()]
    update = UPDATES[optimizer](parameters, lr=TABLE_LEARNING_RATE)
    lookup_error = 0.0
    for batch in draw_ids(tables, batch_size=batch_size, num_batches=2, seed=0).batches:
        values = [torch.from_numpy(batch[name].values) for name in weights]
        lengths = [torch.from_numpy(batch[name].lengths) for name in weights]
        ids = KeyedJaggedTensor(list(weights), torch.cat(values), lengths=torch.cat(lengths))
        pooled = module(ids.to(part.device)).to_dict()
        found = [pooled[name] for name in weights]
        expected = [
            exact[name](of_table.long(), (counts.cumsum(0) - counts).long())
            for name, of_table, counts in zip(weights, values, lengths, strict=True)
        ]
        gradients = [torch.randn(vectors.shape, generator=rng) for vectors in expected]
        for vectors in (found, expected):
            torch.autograd.backward(vectors, [g.to(vectors[0]) for g in gradients])
        update.step()
        update.zero_grad()
        pairs = zip(found, expected, strict=True)
        lookup_error = max(lookup_error, *(relative_error(a, b, b) for a, b in pairs))
    weight_error = max(
        relative_error(weights[name], table.weight, table.weight - start[name])
        for name, table in exact.items()
    )
    errors = {"lookup_error": lookup_error, "weight_error": weight_error}
    if lookup_error <= MAX_LOOKUP_ERROR and weight_error <= MAX_ERROR[optimizer]:
        return errors
    return errors | {"error": "the kernels differ from their definitions"}


def relative_error(found: Tensor, expected: Tensor, scale: Tensor) -> float:
    return float((found.detach().cpu().double() - expected).abs().max() / scale.abs().max())


def one_rank_module(tables: Sequence[Table], optimizer: str, device: torch.device) -> Any:
    """Return tables that lie whole on this rank, with a fused optimizer."""
    topology = Topology(1, memory_bytes=GIB, compute_device=device.type)
    unsharded = EmbeddingBagCollection(tables=bag_configs(tables), device=torch.device("meta"))
    fuse(optimizer, unsharded.parameters(), TABLE_LEARNING_RATE)
    shards = {table.name: [Shard.whole(table, rank=0)] for table in tables}
    plan = EmbeddingModuleShardingPlan(
        {name: parameter_sharding(own, ColumnShards(), topology) for name, own in shards.items()}
    )
    env = sharding_env(dist.group.WORLD)
    return EmbeddingBagCollectionSharder().shard(unsharded, plan, env, device)


class Outcomes:
    """A plug-in of pytest that records each test as it ends, and begins none too late."""

    def __init__(self, part: Part) -> None:
        self._part = part
        self._failures: list[str] = []
        self._skipped = False

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            text = report.longreprtext[-LAST:]
            self._failures.append(f"{report.when}: {text}")
        self._skipped |= report.skipped
        if report.when == "teardown":
            error = {"error": "\n".join(self._failures)} if self._failures else {}
            self._part.record(report.nodeid, skipped=self._skipped, **error)
            self._failures, self._skipped = [], False

    def pytest_runtest_teardown(self, item: pytest.Item) -> None:
        if self._part.seconds_left < 20:
            item.session.shouldstop = "there is no time left"


def tests(part: Part) -> None:
    """Run the tests that need a GPU; in a rehearsal, a few others."""
    os.chdir(ROOT)
    chosen = ["-m", "gpu", "tests/gpu"]
    if part.small:
        chosen = ["tests/unit/ranks/test_devices.py", "tests/unit/hardware/test_gpu_specs.py"]
    # this process has loaded libraries that pytest would look into
    quiet = ["-q", "-W", "ignore::pytest.PytestAssertRewriteWarning"]
    chosen += ["-p", "no:xdist", "-p", "no:cacheprovider"]
    code = pytest.main([*quiet, *chosen], [Outcomes(part)])
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        part.record("pytest", error=f"exit code {int(code)}")


NUM_BATCHES = 8
ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
"""Categories of a trace for what occupies the GPU."""


@dataclass(frozen=True, slots=True)
class MlperfCase:
    """One way to train DLRM-DCNv2."""

    batch_size: int
    pipeline: str
    compile_mode: str | None = None
    dense_graph: bool = False

    @property
    def name(self) -> str:
        compiled = f", compiled {self.compile_mode}" if self.compile_mode else ""
        graph = ", dense graph" if self.dense_graph else ""
        return f"{self.batch_size} {self.pipeline}{compiled}{graph}"


def mlperf_cases(sizes: Sequence[int], *, compiles: bool, on_cuda: bool) -> list[MlperfCase]:
    """Return pipelines by compilation and graph; those that take long to compile come last."""
    cases = [
        MlperfCase(size, pipeline, mode, graph)
        for mode, size in itertools.product((None, "auto", "reduce-overhead"), sizes)
        for graph, pipeline in itertools.product((False, True), ("sparse_dist", "base"))
        if not (graph and mode == "reduce-overhead")
    ]
    need_streams = ("semi_sync", "fused_sparse_dist") if on_cuda else ()
    cases += [MlperfCase(sizes[0], pipeline) for pipeline in ("sparse_dist_lite", *need_streams)]
    cases.sort(key=lambda case: case.compile_mode is not None)
    return [case for case in cases if compiles or case.compile_mode is None]


def mlperf(part: Part) -> None:
    """Measure steps of MLPerf's DLRM-DCNv2 on one rank, and what the host takes of them."""
    sizes = (32,) if part.small else (8192, 65_536)
    model = dcnv2(part.small)
    with process_group() as rank:
        data = functools.cache(lambda size: model.batches(size, NUM_BATCHES))
        cases = {
            case.name: functools.partial(step_figures, part, case, model, data, rank)
            for case in mlperf_cases(
                sizes, compiles=not part.small, on_cuda=rank.device.type == "cuda"
            )
        }
        part.run_cases(cases, seconds=2 if part.small else 12)


def dcnv2(small: bool) -> models.Model:
    """Return MLPerf's model; its tables have at most 10 million rows, 34 GiB in all."""
    max_rows = 1000 if small else 10_000_000
    tables = tuple(
        replace(table, num_embeddings=min(table.num_embeddings, max_rows))
        for table in mlperf_dcnv2()
    )
    if small:
        return models.Model(tables, (32, 128), (32, 1), (3, 16))
    return models.Model(tables, (512, 256, 128), (1024, 1024, 512, 256, 1), (3, 512))


def step_figures(
    part: Part, case: MlperfCase, model: models.Model, data: Callable[[int], Any], rank: Rank
) -> dict[str, Any]:
    """Train some steps, and return what they take of the GPU and of the host's main thread."""
    warmup, timed, profiled = (1, 3, 2) if part.small else (8, 40, 5)
    on_cuda = rank.device.type == "cuda"
    if on_cuda:
        torch.cuda.empty_cache()  # of the case before
        torch.cuda.reset_peak_memory_stats()
    options = {"compile_mode": case.compile_mode, "dense_graph": case.dense_graph}
    training = models.our_training(model, rank, case.batch_size, "size_lookup", **options)
    pipeline: Any = make_pipeline(case.pipeline, *training, rank.device)
    stream = models.stream(data(case.batch_size), rank)
    path = part.out / "traces" / f"{case.name.replace(', ', '_').replace(' ', '_')}.json.gz"
    with Prefetcher(endless(stream), depth=2, device=rank.device) as batches:
        step = functools.partial(pipeline.progress, batches)
        for _ in range(warmup):
            step()
        watch = Stopwatch(rank.device)
        watch.mark()
        main_s = time.thread_time()
        for _ in range(timed):
            loss, *_ = step()
            watch.mark()
        main_ms = 1e3 * (time.thread_time() - main_s) / timed
        step_ms = float(np.median(watch.intervals_ms()))
        gpu_ms = busy_ms(write_trace(step, path, profiled)) / profiled
    figures = {
        "step_ms": step_ms,
        "samples_per_s": 1e3 * case.batch_size / step_ms,
        "main_thread_ms": main_ms,
        "loss": float(loss),
    }
    if on_cuda:
        figures |= {"gpu_busy_ms": gpu_ms, "gpu_waits_share": max(0.0, 1 - gpu_ms / step_ms)}
        figures["peak_gib"] = torch.cuda.max_memory_allocated() / GIB
        figures["reserved_gib"] = torch.cuda.max_memory_reserved() / GIB
    return figures | ({} if math.isfinite(float(loss)) else {"error": "the loss is not finite"})


def endless(batches: Iterable[Any]) -> Iterator[Any]:
    while True:
        yield from batches


def write_trace(step: Callable[[], object], path: Path, num_steps: int) -> list[dict[str, Any]]:
    """Write the trace of some steps, and return its events."""
    path.parent.mkdir(exist_ok=True)
    with profile() as profiler:  # of the CPU, and of the GPU if there is one
        for _ in range(num_steps):
            step()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    profiler.export_chrome_trace(str(path))
    with gzip.open(path, "rt") as file:
        events: list[dict[str, Any]] = json.load(file)["traceEvents"]
    return events


def busy_ms(events: Iterable[Mapping[str, Any]]) -> float:
    """Return the time in which anything runs on the GPU, of the events of a trace."""
    spans = sorted((e["ts"], e["ts"] + e["dur"]) for e in events if e.get("cat") in ON_GPU)
    busy, covered_until = 0.0, -math.inf
    for start, end in spans:
        busy += max(0.0, end - max(start, covered_until))
        covered_until = max(covered_until, end)
    return busy / 1e3


def run(part: Part) -> None:
    """Train with `dlrm-train` on all GPUs, as it is and with the dense graph."""
    ranks = max(torch.cuda.device_count(), 1)
    sizes = [
        *("experiment=mlperf_dcnv2", "data.max_rows=10000000", "data.num_train_batches=16"),
        *(f"batch_size={8192 * ranks}", "trainer.num_steps=150"),
        "trainer.checkpoint.every_steps=60",
    ]
    if part.small:
        sizes = [
            *("batch_size=256", "data.max_rows=500", "trainer.num_steps=12"),
            *("data.num_val_batches=2", "measure.iterations=3", "calibrate=never"),
        ]
    cases = {
        name: functools.partial(trained, part, name, ranks, [*sizes, *overrides])
        for name, overrides in {"plain": [], "dense graph": ["model.dense_graph=true"]}.items()
    }
    part.run_cases(cases, seconds=10 if part.small else 40)


def trained(part: Part, name: str, ranks: int, overrides: Sequence[str]) -> dict[str, Any]:
    """Run a training in a folder of its own and return its result.json."""
    folder = part.out / "run" / f"{name.replace(' ', '_')}_{time.strftime('%H%M%S')}"
    launcher = ["-m", "dlrm_sharded.ranks.torchrun", "--nproc-per-node", str(ranks)]
    command = [sys.executable, *launcher, "-m", "dlrm_sharded.train", f"hydra.run.dir={folder}"]
    code = subprocess.run([*command, *overrides], timeout=part.seconds_left).returncode
    path = folder / "result.json"
    figures = {"exit_code": code, "ranks": ranks}
    if path.exists():
        figures["result"] = json.loads(path.read_text())
    return figures | ({"error": f"exit code {code}"} if code else {})


SHARDERS = (models.SHARDER, "torchrec")
NVLINK_BYTES_PER_S = 450e9
"""Bandwidth of an H100 to the GPUs of its host, in one direction, as its maker states it."""


def ranks(part: Part) -> None:
    """Measure lookups of single ranks: by batch size, and of plans of MLPerf's tables."""
    batch_sizes = (64, 128) if part.small else (128, 1024, 8192, 65_536)
    num_rows, memory_bytes = (1000, GIB // 32) if part.small else (1_000_000, 30 * GIB)
    config = MeasureConfig(iterations=3 if part.small else 12, warmup=2, num_batches=2)
    optimizer = "rowwise_adagrad"
    with process_group():
        bench = RankBench(config, part.device, optimizer=optimizer, table_bytes=memory_bytes)
        tables = [Table(f"t{i}", num_rows, 128, 10.0) for i in range(8)]
        cases: dict[str, Callable[[], dict[str, Any]]] = {
            f"batch {size}": functools.partial(lookup_ns, bench, tables, size)
            for size in batch_sizes
        }
        plans = functools.partial(plan_figures, part, bench, max(batch_sizes), memory_bytes)
        part.run_cases(cases | {"MLPerf's plans": plans}, seconds=2 if part.small else 10)


def lookup_ns(bench: RankBench, tables: Sequence[Table], batch_size: int) -> dict[str, Any]:
    """Return the times of an id in tables that lie whole on a rank."""
    ids = draw_ids(tables, batch_size=batch_size, num_batches=2, seed=0)
    cost = bench.measure([Shard.whole(table, rank=0) for table in tables], ids)
    num_ids = sum(len(of_table.values) for of_table in ids.batches[0].values())
    return {f"{stage}_ns": 1e6 * cost.stage_ms(stage) / num_ids for stage in COMPUTE_STAGES}


def plan_figures(
    part: Part, bench: RankBench, batch_size: int, memory_bytes: int
) -> dict[str, Any]:
    """Measure the ranks of the sharders' plans; exchanges are as predicted."""
    topology = Topology(
        *(8, memory_bytes),
        local_world_size=8,
        optimizer_bytes_per_row=4,
        intra_host_bytes_per_s=NVLINK_BYTES_PER_S,
        compute_device=part.device.type,
    )
    task = with_profiles(ShardingTask(dcnv2(part.small).tables, topology, batch_size))
    context = RunContext(part.device.type, local_hardware(part.device))
    cost_model = learned_cost_model(context)
    plans, predicted = {}, {}
    for sharder in SHARDERS:
        planner = Planner(make_sharder(sharder, cost_model, run=context), cost_model)
        plans[sharder], report = planner.plan(task)
        assert report.cost is not None
        predicted[sharder] = report.cost
    ids = draw_ids(task.tables, batch_size=batch_size, num_batches=2, seed=0, num_ranks=8)
    measured = measure_plans(plans, predicted, bench, ids)
    return {
        sharder: {
            "by_rank_ms": [rank.computation_ms for rank in measured.costs[sharder].per_rank],
            "predicted_by_rank_ms": [rank.computation_ms for rank in predicted[sharder].per_rank],
            "predicted_exchange_ms": max(r.exchange_ms for r in predicted[sharder].per_rank),
        }
        for sharder in SHARDERS
    }


PARTS: dict[str, tuple[Callable[[Part], None], float]] = {
    "environment": (environment, 70),
    "kernels": (kernels, 60),
    "tests": (tests, 260),
    "mlperf": (mlperf, 200),
    "run": (run, 130),
    "ranks": (ranks, 110),
}
"""The parts in order, and their limits in s."""


def run_part(name: str, options: argparse.Namespace, limit_s: float) -> dict[str, Any]:
    """Run a part in a process of its own, and return how it ended."""
    command = [sys.executable, str(Path(__file__).resolve()), "--out", str(options.out), "--alone"]
    command += ["--parts", name, "--limit-s", str(limit_s), *(["--small"] if options.small else [])]
    started, before = time.monotonic(), gpu_state()
    with (options.out / f"{name}.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        try:
            status = "failed" if process.wait(limit_s) else "ok"
        except subprocess.TimeoutExpired:
            status = "out of time"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    end = {"status": status, "seconds": round(time.monotonic() - started, 1), "commit": commit()}
    if status != "ok":
        end["log_end"] = (options.out / f"{name}.log").read_text(errors="replace")[-LAST:]
    return end | {"gpu_before": before, "gpu_after": gpu_state()}


def gpu_state() -> str:
    return nvidia_smi(f"--query-gpu={GPU_STATE}", "--format=csv,noheader").strip()


def run_alone(options: argparse.Namespace) -> int:
    """Run one part in this process."""
    die_with_parent()
    warnings.filterwarnings("ignore", category=FutureWarning)
    [name] = options.parts
    part = Part(name, options.out, options.small, time.monotonic() + options.limit_s - 5)
    PARTS[name][0](part)
    return 1 if part.errors else 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--parts", type=lambda text: text.split(","), default=list(PARTS))
    parser.add_argument("--limit-s", type=float, default=840, help="of all parts [%(default)s]")
    parser.add_argument("--small", action="store_true", help="rehearse with small sizes")
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"no part is named {', '.join(sorted(unknown))}; known: {', '.join(PARTS)}")
    options.out = options.out.resolve()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.alone:
        return run_alone(options)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    ends_at = time.monotonic() + options.limit_s
    failed = False
    for name in options.parts:
        limit_s = min(PARTS[name][1], ends_at - time.monotonic())
        if limit_s < 10:
            end: dict[str, Any] = {"status": "no time", "seconds": 0}
        else:
            end = run_part(name, options, limit_s)
        failed |= end["status"] != "ok"
        with (options.out / RESULTS).open("a") as file:
            file.write(json.dumps({"part": name, **end}) + "\n")
        print(f"{name}: {end['status']} after {end['seconds']:.0f} s", flush=True)
    print(f"results: {options.out / RESULTS}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
