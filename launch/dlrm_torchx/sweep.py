"""A batch of a Hydra sweep as TorchX apps: submit, wait, say what came of it."""

from __future__ import annotations

import json
import logging
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ValueType
from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn, JobStatus, configure_log, setup_globals
from hydra.types import HydraContext, TaskFunction
from hydra.utils import get_method
from omegaconf import DictConfig, OmegaConf, open_dict
from torchx.runner import Runner, get_runner
from torchx.runner.config import apply as apply_torchxconfig
from torchx.schedulers import get_scheduler_factories
from torchx.specs import InvalidRunConfigException

from dlrm_sharded.errors import (
    ConfigError,
    IncompleteSweepError,
    UserError,
    check_count,
    check_number,
)
from dlrm_torchx.app import JobShape, count_local_gpus, torchrun_app
from dlrm_torchx.exchange import Exchange, Task
from dlrm_torchx.jobs import JobState, SweepJob

log = logging.getLogger(__name__)

RANKS_WITHOUT_GPUS = 2
LOCAL_POLL_S = 0.1
CLUSTER_POLL_S = 5.0


@dataclass(frozen=True, kw_only=True)
class SweepOptions:
    """`hydra.launcher.*`, checked; see `TorchXLauncherConf`."""

    scheduler: str
    scheduler_args: Mapping[str, Any] | None
    j: str | None
    cpu: int
    gpu: int
    memMB: int  # noqa: N815, as TorchX's own components call it
    max_restarts: int
    max_retries: int
    env: Mapping[str, object] | None
    image: str
    max_parallel: int | None
    poll_s: float | None
    after: str | None

    def __post_init__(self) -> None:
        known = sorted(get_scheduler_factories())
        if self.scheduler not in known:
            raise ConfigError(
                f"hydra.launcher.scheduler is {self.scheduler!r}; known: {', '.join(known)}"
            )
        for key, value in (("scheduler_args", self.scheduler_args), ("env", self.env)):
            if value is not None and not isinstance(value, Mapping):
                raise ConfigError(f"hydra.launcher.{key} is {value!r}, must be like {{a: b}}")
        if self.max_parallel is not None:
            check_count("hydra.launcher.max_parallel", self.max_parallel, least=1)
        if self.poll_s is not None:
            check_number("hydra.launcher.poll_s", self.poll_s, above=True)

    @property
    def is_local(self) -> bool:
        return self.scheduler.startswith("local")

    def shape(self) -> JobShape:
        """Of every job of the sweep.

        Raises:
            ConfigError: with the key of hydra.launcher that is wrong.
        """
        j, gpu = self.j, self.gpu
        if j is None:
            if not self.is_local:
                raise ConfigError(
                    f"hydra.launcher.j is not set; give NODESxRANKS for {self.scheduler}, such as "
                    "hydra.launcher.j=2x8"
                )
            j = f"1x{count_local_gpus() or RANKS_WITHOUT_GPUS}"
        try:
            return JobShape.of(
                j=j,
                cpu=self.cpu,
                gpu=gpu,
                memMB=self.memMB,
                max_restarts=self.max_restarts,
                max_retries=self.max_retries,
            )
        except ConfigError as error:
            raise ConfigError(f"hydra.launcher.{error}") from None

    def most_parallel(self, num_jobs: int) -> int:
        return self.max_parallel or (1 if self.is_local else max(num_jobs, 1))

    def args_for(self, runner: Runner) -> dict[str, Any]:
        """The scheduler's own options, with the defaults of .torchxconfig."""
        known = {name for name, _ in runner.scheduler_run_opts(self.scheduler)}
        args = dict(self.scheduler_args or {})
        for name in args:
            if name not in known:
                raise ConfigError(
                    f"hydra.launcher.scheduler_args.{name} is no option of {self.scheduler}; "
                    f"known: {', '.join(sorted(known))}"
                )
        apply_torchxconfig(self.scheduler, args)
        return args


def launch(
    options: SweepOptions,
    job_overrides: Sequence[Sequence[str]],
    *,
    first_num: int,
    hydra_context: HydraContext,
    task_function: TaskFunction,
    config: DictConfig,
) -> list[JobReturn]:
    """Run a batch of jobs to the end.

    The return of a job that did not succeed raises an `IncompleteSweepError` about the whole batch
    when its value is asked for, which is how Hydra's sweepers treat failures.
    """
    setup_globals()
    configure_log(config.hydra.hydra_logging, config.hydra.verbose)
    logging.getLogger("torchx").setLevel(logging.WARNING)
    sweep_dir = Path(str(config.hydra.sweep.dir)).resolve()
    sweep_dir.mkdir(parents=True, exist_ok=True)
    jobs = [
        prepare(num, overrides, hydra_context, config, sweep_dir)
        for num, overrides in enumerate(job_overrides, start=first_num)
    ]
    with kept_signals(), get_runner() as runner:
        sweep = Sweep(options, jobs, sweep_dir, runner)
        raise_on_signals()
        try:
            sweep.run(hydra_context, task_function)
        finally:
            with no_signals():
                sweep.stop()
                sweep.report()
    return returns(jobs, sweep_dir)


class Sweep:
    """The jobs of one batch, from the first submission to the last end."""

    def __init__(
        self, options: SweepOptions, jobs: list[SweepJob], sweep_dir: Path, runner: Runner
    ) -> None:
        self._options = options
        self._jobs = jobs
        self._sweep_dir = sweep_dir
        self._runner = runner
        self._earlier = earlier_jobs(sweep_dir, before=jobs[0].num) if jobs else []
        try:
            self._shape = options.shape()
            self._args = options.args_for(runner)
        except InvalidRunConfigException as error:
            raise ConfigError(f"hydra.launcher.scheduler_args: {error}") from None

    def run(self, hydra_context: HydraContext, task_function: TaskFunction) -> None:
        waiting = [job for job in self._jobs if job.state is JobState.NOT_STARTED]
        waiting.reverse()
        most = self._options.most_parallel(len(waiting))
        default_poll_s = LOCAL_POLL_S if self._options.is_local else CLUSTER_POLL_S
        log.info(
            "%d jobs of %dx%d ranks on %s, at most %d at a time; sweep in %s",
            len(waiting),
            self._shape.num_nodes,
            self._shape.ranks_per_node,
            self._options.scheduler,
            most,
            _short(self._sweep_dir),
        )
        for job in self._jobs:
            if job.state is JobState.SKIPPED:
                log.info("%s: skipped: %s", job.title, job.reason)
        while waiting or self._active():
            while waiting and len(self._active()) < most:
                self._submit(waiting.pop(), hydra_context, task_function)
            for job in self._active():
                before = job.state
                job.poll(self._runner)
                if not job.state.is_active:
                    self._tell_end(job)
                if job.state is not before:
                    self._save()
            if self._active():
                time.sleep(self._options.poll_s or default_poll_s)

    def stop(self) -> None:
        """End the apps that still run: after an error, or Ctrl-C."""
        active = self._active()
        if not active:
            return
        log.info("ending %d jobs", len(active))
        with ThreadPoolExecutor(max_workers=len(active)) as pool:
            list(pool.map(lambda job: job.cancel(self._runner), active))

    def report(self) -> None:
        """Remember what became of the jobs, and call `after`."""
        self._save()
        if self._options.after is not None and any(job.handle for job in self._jobs):
            try:
                said = get_method(self._options.after)(self._sweep_dir)
            except UserError as error:
                said = f"{self._options.after}: {error}"
            if said:
                log.info("%s", said)

    def _active(self) -> list[SweepJob]:
        return [job for job in self._jobs if job.state.is_active]

    def _submit(
        self, job: SweepJob, hydra_context: HydraContext, task_function: TaskFunction
    ) -> None:
        job.exchange.send_task(
            Task(task_function, job.config, hydra_context, Singleton.get_state())
        )
        app = torchrun_app(
            "dlrm_torchx.worker",
            [str(job.exchange.folder)],
            self._shape,
            name=f"{job.config.hydra.job.name}-{job.num}".replace("_", "-"),
            image=self._options.image,
            env={key: str(value) for key, value in (self._options.env or {}).items()},
        )
        try:
            job.submit(self._runner, app, self._options.scheduler, self._args)
        except (OSError, subprocess.SubprocessError, UserError, InvalidRunConfigException) as error:
            if not any(other.handle for other in self._jobs):
                raise  # what refuses the first job would refuse the others
            job.fail(f"not submitted: {error}")
        where = "" if job.log is None else f", log in {_short(job.log)}"
        log.info("%s: %s%s", job.title, job.handle or job.reason, where)
        self._save()

    def _tell_end(self, job: SweepJob) -> None:
        outcome = "" if job.reason is None else f": {job.reason}"
        if job.returned is not None and isinstance(job.returned.return_value, int | float):
            outcome = f": {job.returned.return_value:,.6g}"
        log.info("%s: %s after %.1f s%s", job.title, job.state, job.seconds, outcome)

    def _save(self) -> None:
        jobs = [*self._earlier, *(job.to_json(self._sweep_dir) for job in self._jobs)]
        part = self._sweep_dir / "sweep.json.part"
        part.write_text(json.dumps({"jobs": jobs}, indent=1))
        part.rename(self._sweep_dir / "sweep.json")


def prepare(
    num: int,
    overrides: Sequence[str],
    hydra_context: HydraContext,
    config: DictConfig,
    sweep_dir: Path,
) -> SweepJob:
    """Compose one job's config, in a form that does not change with the time or the rank."""
    job_config = hydra_context.config_loader.load_sweep_config(config, list(overrides))
    with open_dict(job_config):
        job_config.hydra.job.id = str(num)
        job_config.hydra.job.num = num
        job_config.hydra.sweep.dir = str(sweep_dir)
    subdir = resolved_subdir(job_config)
    with open_dict(job_config):
        job_config.hydra.sweep.subdir = subdir
    swept = [item for item in overrides if item not in config.hydra.overrides.task]
    job = SweepJob(
        num=num,
        title=" ".join([f"#{num}", *(swept or [subdir])]),
        overrides=list(OmegaConf.to_container(job_config.hydra.overrides.task)),  # type: ignore[arg-type]
        config=job_config,
        folder=sweep_dir / subdir,
        exchange=Exchange(sweep_dir / ".torchx" / str(num)),
    )
    lacking = glob_without_value(job_config, config, hydra_context)
    if lacking is not None:
        job.state, job.reason = JobState.SKIPPED, f"{lacking} is not set"
    return job


def resolved_subdir(job_config: DictConfig) -> str:
    """`hydra.sweep.subdir`, where `${hydra:...}` speaks of this job."""
    hydra_config = HydraConfig.instance()
    outer = hydra_config.cfg
    hydra_config.set_config(job_config.copy())
    try:
        return str(job_config.hydra.sweep.subdir)
    finally:
        hydra_config.cfg = outer


def glob_without_value(
    job_config: DictConfig, config: DictConfig, hydra_context: HydraContext
) -> str | None:
    """The key without which an option cannot be used that a glob named, and not the user."""
    parser = OverridesParser.create(config_loader=hydra_context.config_loader)
    for override in parser.parse_overrides(list(config.hydra.overrides.task)):
        if override.value_type is not ValueType.GLOB_CHOICE_SWEEP:
            continue
        key = override.get_key_element().lstrip("+").replace("/", ".")
        node = OmegaConf.select(job_config, key)
        missing = OmegaConf.missing_keys(node) if OmegaConf.is_config(node) else set()
        if missing:
            return min(missing)
    return None


def returns(jobs: Sequence[SweepJob], sweep_dir: Path) -> list[JobReturn]:
    failed = [job for job in jobs if job.state not in (JobState.SUCCEEDED, JobState.SKIPPED)]
    lines = [f"{len(failed)} of {len(jobs)} jobs did not succeed; sweep in {_short(sweep_dir)}"]
    for job in failed:
        where = "" if job.log is None else f"\n    log: {_short(job.log)}"
        reason = "" if job.reason is None else f": {job.reason}"
        lines.append(f"  {job.title}: {job.state}{reason}{where}")
    error = IncompleteSweepError("\n".join(lines))
    found = []
    for job in jobs:
        job_return = job.returned
        if job_return is None:
            job_return = JobReturn(overrides=job.overrides, cfg=job.config)
            skipped = job.state is JobState.SKIPPED
            job_return.status = JobStatus.COMPLETED if skipped else JobStatus.FAILED
            job_return.return_value = None if skipped else error
        found.append(job_return)
    return found


def earlier_jobs(sweep_dir: Path, *, before: int) -> list[dict[str, Any]]:
    """Jobs of the batches before this one, of a sweeper that works in batches."""
    path = sweep_dir / "sweep.json"
    if before == 0 or not path.exists():
        return []
    return [job for job in json.loads(path.read_text())["jobs"] if job["num"] < before]


STOPPING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def kept_signals() -> Iterator[None]:
    """What the block does with signals ends with it; TorchX's local scheduler sets its handlers."""
    outer = {number: signal.getsignal(number) for number in STOPPING_SIGNALS}
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in outer.items():
                signal.signal(number, handler)


def raise_on_signals() -> None:
    """So that Ctrl-C, a kill or a closed terminal still ends the apps that this process started."""

    def end(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    if threading.current_thread() is threading.main_thread():
        for number in STOPPING_SIGNALS:
            signal.signal(number, end)
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def no_signals() -> Iterator[None]:
    """Nothing interrupts the block: its work is short, and what it ends must be ended."""
    outer = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, outer)


def _short(path: Path) -> str:
    """As seen from the current folder, where it lies below it."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
