"""Run the first tests on new GPUs, and keep the figures of every case.

python scripts/first_gpu.py --out OUT               one GPU, at most 480 s
python scripts/first_gpu.py --out OUT --ranks 8     2 to 8 GPUs of a host, at most 600 s
python scripts/first_gpu.py --out OUT --small       a rehearsal, also on a CPU; with --ranks 2 too

All cases are commands that users call. OUT/results.jsonl gets a line for each case as it ends, and
one for each part; OUT/PART.log has what the commands printed, and OUT.tar.gz is what to send back.
docs/notes/gpus.md says what the parts show. The exit code is 1 if a case failed.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlrm_sharded.files.provenance import commit, versions
from dlrm_sharded.ranks.gpus import nvidia_smi, visible_gpus
from dlrm_sharded.ranks.process import LAUNCHER_VARIABLE
from dlrm_sharded.runs.rounds import read_rounds
from dlrm_sharded.training.pipelines import PIPELINES

ROOT = Path(__file__).resolve().parents[1]
RESULTS = "results.jsonl"
GPU_STATE = "--query-gpu=name,driver_version,memory.used,clocks.sm,power.draw,temperature.gpu"
CACHE = "cache"
"""Folder of probes, samples and fitted costs, in place of the user's cache."""

LAST, END_S = 2000, 30
"""Number of last characters of an output to keep, and time for a command to end its ranks."""

MLPERF = (
    *("experiment=mlperf_dcnv2", "optimizer=adagrad", "sharder=size_lookup", "round_steps=40"),
    *("data.max_rows=10000000", "data.num_val_batches=1", "measure.time_budget_s=2"),
    "trainer.num_steps=100",
)
SMALL_MODEL = (
    *("model.dense_layers=[16,128]", "model.over_layers=[16,1]", "model.cross_rank=8"),
    *("data.max_rows=1000", "data.num_train_batches=4", "batch_size=32", "round_steps=4"),
)
DEMO = {
    True: ("batch_size=512", "data.num_val_batches=1", "trainer.num_steps=20", "round_steps=4"),
    False: ("experiment=gpu_demo", "data.num_train_batches=4", "trainer.num_steps=60"),
}
"""What ranks train in a rehearsal (True), and on GPUs (False)."""


def case(pipeline: str, compile_mode: str = "none", *, graph: bool = False) -> dict[str, Any]:
    """Return the settings of a way to train; a case without settings is chosen in the warm-up."""
    model = {"compile_mode": compile_mode, "dense_graph": graph}
    return {"trainer": {"pipeline": pipeline}, "model": model}


CASES: dict[str, dict[str, Any]] = {
    **{name: case(name) for name in PIPELINES},
    **{f"{name}_graph": case(name, graph=True) for name in ("base", "sparse_dist")},
    "default": {},
    "default_not_bound": {},
    "old_default": case("sparse_dist", "default"),
}
SHARE, WHOLE = "base,sparse_dist,base_graph,default", "old_default,default"
KEYS = ("step_ms", "embedding_cost_ms")
SHARDERS = "sharder=random,dim,size_lookup,search,torchrec"


@dataclass(slots=True)
class Part:
    """One part of the script while it runs.

    Args:
        ends_at: time of `time.monotonic` at which its command is ended.
    """

    name: str
    out: Path
    small: bool
    ranks: int
    ends_at: float = 0.0
    has_failed: bool = False

    @property
    def log(self) -> Path:
        return self.out / f"{self.name}.log"

    def record(self, name: str, **figures: Any) -> None:
        """Append the figures of a case to the results; "error" among them is a failure."""
        self.has_failed |= "error" in figures
        with (self.out / RESULTS).open("a") as file:
            file.write(json.dumps({"part": self.name, "case": name, **figures}) + "\n")
        shown = {key: value for key, value in figures.items() if not isinstance(value, dict | list)}
        print(f"{self.name}, {name}: {shown}", flush=True)

    @contextlib.contextmanager
    def started(self, words: Sequence[str], **variables: str) -> Iterator[subprocess.Popen[bytes]]:
        """Start Python with these arguments, and end it with its ranks."""
        path = os.pathsep.join([str(ROOT), str(ROOT / "launch"), os.environ.get("PYTHONPATH", "")])
        own = {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
        own |= {"DLRM_SHARDED_CACHE": str(self.out / CACHE), **variables}
        options: dict[str, Any] = {"cwd": ROOT, "env": os.environ | own, "start_new_session": True}
        with self.log.open("ab") as log:
            command = [sys.executable, *words]
            process = subprocess.Popen(command, stdout=log, stderr=log, **options)
        try:
            yield process
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(END_S)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def run(
        self,
        name: str,
        words: Sequence[str],
        figures: Callable[[], Mapping[str, Any]] = dict,
        **variables: str,
    ) -> None:
        """Record how a command with these variables ends, and its figures, also if it is ended."""
        began = time.monotonic()
        problem = {}
        with self.started(words, **variables) as process:
            try:
                if code := process.wait(max(self.ends_at - began, 0)):
                    problem["error"] = f"exit code {code}"
            except subprocess.TimeoutExpired:
                problem["error"] = "out of time"
        if problem:
            problem["output"] = self.text()[-LAST:]
        seconds = round(time.monotonic() - began, 1)
        self.record(name, seconds=seconds, **problem, **figures())

    def text(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def await_line(self, text: str) -> str:
        """Wait for a line of the log with a text, and return it."""
        while time.monotonic() < self.ends_at:
            if lines := [line for line in self.text().splitlines() if text in line]:
                return lines[0]
            time.sleep(0.2)
        raise TimeoutError(f"no line with {text!r}")


def launched(part: Part, *words: str) -> list[str]:
    return ["-m", "dlrm_sharded.ranks.torchrun", "--nproc-per-node", str(part.ranks), *words]


def training(*words: str) -> list[str]:
    common = ("journal=none", "calibrate=never", "trainer.checkpoint.every_s=null")
    return ["-m", "dlrm_sharded.train", *words, *common]


def environment(part: Part) -> None:
    """Record versions, and whether the installation works."""
    part.record("versions", **versions(), cores=os.cpu_count())
    part.run("dlrm-check-install", ["-m", "dlrm_sharded.commands.check_install"])


def exchanges(part: Part) -> None:
    """Measure lookups and exchanges of all ranks, and fit the cost model to them."""
    words = [f"num_ranks={part.ranks}", f"out={part.out / part.name}", "minutes=0.6"]
    words += ["journal=auto", *(["batch_sizes=[512]"] if part.small else [])]
    part.run("dlrm-calibrate", ["-m", "dlrm_sharded.commands.calibrate", *words])


TESTS = "graph or memory or steps_change or options_that or half_precision or leaves or of_lookups"


def tests(part: Part) -> None:
    """Run the tests of graphs and memory that need a GPU; in a rehearsal, the CPU variants."""
    words = ["-m", "pytest", "tests/gpu", "-vv", "-p", "no:xdist", "-p", "no:cacheprovider"]
    words += ["-k", f"({TESTS}) and cpu"] if part.small else ["-k", TESTS, "-m", "gpu"]
    pattern = re.compile(r"^tests/gpu/\S+::(\S+) (PASSED|FAILED|SKIPPED|ERROR)", re.M)
    part.run("tests", words, lambda: {"outcomes": dict(pattern.findall(part.text()))})


def with_cases(part: Part) -> str:
    """Write a config for each way to train, which `+case=NAME` chooses; return the option."""
    folder = part.out / "conf" / "case"
    folder.mkdir(parents=True, exist_ok=True)
    for name, settings in CASES.items():
        (folder / f"{name}.yaml").write_text(f"# @package _global_\n{json.dumps(settings)}\n")
    return f"--config-dir={folder.parent}"


def sweep(
    part: Part, choice: str, overrides: Sequence[str], rounds: int
) -> dict[str, dict[str, float]]:
    """Train every choice in one job of all ranks, measure them in rounds, and record the results.

    Returns:
        Medians over the rounds, by choice, for the choices that were measured.
    """
    group, names = choice.lstrip("+").split("=")
    folder, medians = part.out / part.name, {}
    launcher = (f"hydra.launcher.rounds={rounds}", f"hydra.launcher.j=1x{part.ranks}")
    place = (f"hydra.sweep.dir={folder}", f"hydra.sweep.subdir=${{hydra:runtime.choices.{group}}}")
    part.run("sweep", training("-m", *overrides, choice, *launcher, *place))
    for name in names.split(","):
        if found := read_rounds(folder / name).values():
            pairs = [(key, [getattr(one, key) for one in found]) for key in KEYS]
            medians[name] = {key: statistics.median(values) for key, values in pairs}
        figures: dict[str, Any] = medians.get(name) or {"error": "no round was measured"}
        part.record(name, rounds=len(found), **figures, **result_in(folder / name))
    return medians


def result_in(folder: Path) -> dict[str, Any]:
    path = folder / "result.json"
    return {"result": json.loads(path.read_text())} if path.exists() else {}


def mlperf(part: Part, names: str, batch_size: int) -> None:
    """Measure steps of MLPerf's DLRM-DCNv2 in rounds, and compare the default with the others."""
    sizes = (f"batch_size={batch_size}", f"data.num_train_batches={2**17 // batch_size}")
    words = [with_cases(part), *MLPERF, *(SMALL_MODEL if part.small else sizes)]
    medians = sweep(part, f"+case={names}", words, 1 if part.small else 3)
    times = {name: found["step_ms"] for name, found in medians.items()}
    if (default := times.pop("default", None)) and times:
        fastest = min(times, key=times.__getitem__)
        ratio = default / times[fastest]
        part.record("default over the fastest other", fastest=fastest, ratio=ratio)


def pipelines(part: Part) -> None:
    """Train to the end with every pipeline, with graphs, and with ranks not bound to NUMA nodes."""
    for name in (name for name in CASES if name != "old_default"):
        variables = {"DLRM_SHARDED_NUMA_BINDING": "none"} if "not_bound" in name else {}
        folder = part.out / part.name / name
        place = (with_cases(part), f"+case={name}", f"hydra.run.dir={folder}")
        words = launched(part, *training(*place, *DEMO[part.small], "sharder=size_lookup"))
        part.run(name, words, functools.partial(result_in, folder), **variables)


def lose_rank(part: Part, number: signal.Signals, said: str) -> None:
    """Send a signal to rank 1 of a training run, and record how long the job takes to report it."""
    place = f"hydra.run.dir={part.out / part.name}"
    sizes = (*DEMO[part.small], "trainer.num_steps=1000000", "sharder=size_lookup")
    with part.started(launched(part, *training(place, *sizes))) as process:
        part.await_line("embedding cost")
        time.sleep(5)
        victim, began = pid_of(1, process.pid), time.monotonic()
        os.kill(victim, number)
        if number == signal.SIGKILL:
            process.wait(max(part.ends_at - began, 0))
        line = part.await_line(said)
        part.record("rank 1", seconds=round(time.monotonic() - began, 1), line=line)
        if number == signal.SIGSTOP:
            os.kill(victim, signal.SIGCONT)


def pid_of(rank: int, launcher: int) -> int:
    """Return the pid of a rank, found by the environment that its launcher gave it."""
    needed = {f"RANK={rank}".encode(), f"{LAUNCHER_VARIABLE}={launcher}".encode()}
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if needed <= {*path.read_bytes().split(b"\0")}:
                return int(path.parent.name)
    raise ProcessLookupError(f"rank {rank} of launcher {launcher} does not run")


def sharders(part: Part) -> None:
    """Measure five sharders in rounds, and the rank correlation of embedding cost and step time."""
    from scipy.stats import spearmanr

    medians = sweep(part, SHARDERS, DEMO[part.small], 2).values()
    times, costs = ([one[key] for one in medians] for key in KEYS)
    part.record("rank correlation", value=float(spearmanr(costs, times).statistic))


Parts = Mapping[str, tuple[Callable[[Part], None], float]]
ONE_GPU: Parts = {
    "environment": (environment, 30),
    "tests": (tests, 130),
    "mlperf_share": (functools.partial(mlperf, names=SHARE, batch_size=8192), 210),
    "mlperf_whole": (functools.partial(mlperf, names=WHOLE, batch_size=65_536), 110),
}
SEVERAL_GPUS: Parts = {
    "environment": (environment, 30),
    "pipelines": (pipelines, 190),
    "exchanges": (exchanges, 60),
    "killed": (functools.partial(lose_rank, number=signal.SIGKILL, said="rank 1 was killed"), 60),
    "stopped": (functools.partial(lose_rank, number=signal.SIGSTOP, said="waited for: rank 1"), 90),
    "sharders": (sharders, 170),
}
"""The parts in order, and their limits in s."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--ranks", type=int, default=1, help="GPUs, or ranks on a CPU")
    parser.add_argument("--parts", help="some of them, such as environment,tests")
    parser.add_argument("--limit-s", type=float, help="of all parts [480, or 600]")
    parser.add_argument("--small", action="store_true", help="rehearse with small sizes")
    options = parser.parse_args()
    options.out = options.out.resolve()
    options.out.mkdir(parents=True, exist_ok=True)
    parts = ONE_GPU if options.ranks == 1 else SEVERAL_GPUS
    chosen = options.parts.split(",") if options.parts else list(parts)
    if unknown := set(chosen) - set(parts):
        parser.error(f"no part is named {', '.join(sorted(unknown))}; known: {', '.join(parts)}")
    if not options.small and len(visible_gpus()) < options.ranks:
        parser.error(f"{options.ranks} GPUs are needed; --small rehearses on a CPU")
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    slowness = 10 if options.small else 1  # of a CPU
    limit_s = options.limit_s or slowness * sum(parts[name][1] for name in chosen)
    ends_at, has_failed = time.monotonic() + limit_s, False
    for name in chosen:
        began, (work, limit_s) = time.monotonic(), parts[name]
        part = Part(name, options.out, options.small, options.ranks)
        part.ends_at = min(began + slowness * limit_s, ends_at)
        try:
            work(part)
        except Exception as error:  # the other parts still measure something
            part.record("part", error=f"{type(error).__name__}: {error}"[:LAST])
        has_failed |= part.has_failed
        status = "failed" if part.has_failed else "ok"
        seconds = round(time.monotonic() - began, 1)
        gpus = nvidia_smi(GPU_STATE, "--format=csv,noheader").splitlines()
        probes = [json.loads(path.read_text()) for path in (part.out / CACHE).glob("probe-*.json")]
        end = {"status": status, "seconds": seconds, "commit": commit()}
        part.record("end", **end, gpus=gpus, probes=probes)
    print(f"send {shutil.make_archive(str(options.out), 'gztar', options.out)}")
    return 1 if has_failed else 0


if __name__ == "__main__":
    sys.exit(main())
