"""What schedulers are asked for by a sweep in rounds: one app, whose pods share its folder."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hydra.core.utils import JobReturn, JobStatus
from omegaconf import OmegaConf
from torchx.runner import get_runner
from torchx.specs import AppDef, AppState, AppStatus

from dlrm_sharded.files.errors import ConfigError, IncompleteSweepError
from dlrm_torchx.jobs import SweepJob
from dlrm_torchx.mailbox import JobMailbox
from dlrm_torchx.options import SweepOptions
from dlrm_torchx.sweep import Sweep


class DryCluster:
    """Keeps the requests that TorchX would send, and lets each app succeed at once."""

    def __init__(self, sweep_dir: Path) -> None:
        self.requests: list[Any] = []
        self.looks_left = 0
        """How often an app still runs."""
        self.ends = AppState.SUCCEEDED
        self._torchx = get_runner()
        self._boxes = sweep_dir / ".torchx"

    def scheduler_run_opts(self, scheduler: str) -> Any:
        return self._torchx.scheduler_run_opts(scheduler)

    def run(self, app: AppDef, scheduler: str, args: dict[str, Any]) -> str:
        self.requests.append(self._torchx.dryrun(app, scheduler, args).request)
        return "kubernetes://torchx/default:rounds-0"

    def status(self, handle: str) -> AppStatus:
        if self.looks_left:
            self.looks_left -= 1
            return AppStatus(AppState.RUNNING)
        for box in self._boxes.iterdir():
            if self.ends == AppState.SUCCEEDED or box.name != "rounds":
                JobMailbox(box).send_return(JobReturn(status=JobStatus.COMPLETED))
        return AppStatus(self.ends, msg="CANCELLED")


def rounds_on_kubernetes(sweep_dir: Path, mounted: str) -> Sweep:
    options = SweepOptions(
        scheduler="kubernetes",
        scheduler_args={"queue": "training"},
        j="2x8",
        image="dlrm:1",
        memMB=64_000,
        mounts=["type=volume", "src=shared", f"dst={mounted}"],
        rounds=5,
        poll_s=0.01,
        after=None,
    )
    config = OmegaConf.create({"round": "none", "seed": 0})
    config.hydra = {"runtime": {"choices": {}}}
    jobs = [
        SweepJob(
            *(num, f"#{num} sharder={name}", [], config, sweep_dir / name),
            mailbox=JobMailbox(sweep_dir / ".torchx" / str(num)),
        )
        for num, name in enumerate(("random", "size", "dim"))
    ]
    return Sweep(options, jobs, [], sweep_dir, DryCluster(sweep_dir))  # type: ignore[arg-type]


def test_a_sweep_in_rounds_is_one_app_on_kubernetes(tmp_path):
    sweep = rounds_on_kubernetes(tmp_path, str(tmp_path))
    sweep.run(SimpleNamespace(), print)
    [request] = sweep.runner.requests
    tasks = request.resource["spec"]["tasks"]
    assert [task["replicas"] for task in tasks] == [1, 1]
    for task in tasks:
        [container] = task["template"].spec.containers
        command = container.command[-1]
        assert "--nnodes 2 --nproc-per-node 8" in command
        assert command.endswith(f"-m dlrm_torchx.worker {tmp_path}/.torchx/rounds")
        assert str(tmp_path) in [mount.mount_path for mount in container.volume_mounts]
    assert [job.state for job in sweep.jobs] == ["succeeded"] * 3


def test_an_app_whose_driver_was_killed_is_waited_for(tmp_path):
    """Two runs are trained, and the rounds of all are not over."""
    sweep = rounds_on_kubernetes(tmp_path, str(tmp_path))
    for job in sweep.jobs[:2]:
        job.mailbox.folder.mkdir(parents=True)
        job.mailbox.send_return(JobReturn(status=JobStatus.COMPLETED))
    sweep.jobs[2].mailbox.folder.mkdir()
    (tmp_path / ".torchx" / "rounds").mkdir()
    sweep.runner.looks_left = 5
    record = {"app": "kubernetes://torchx/default:rounds-0", "log": None, "seconds": None}
    sweep.take_up([record | {"state": "running"}] * 3)
    assert [job.state for job in sweep.jobs] == ["succeeded", "succeeded", "running"]
    sweep.run(SimpleNamespace(), print)
    assert sweep.runner.requests == []
    assert [job.state for job in sweep.jobs] == ["succeeded"] * 3


def test_cancelled_rounds_fail_the_sweep(tmp_path):
    sweep = rounds_on_kubernetes(tmp_path, str(tmp_path))
    sweep.runner.ends = AppState.CANCELLED
    advice = rf"the 15 measurements left, repeat .* hydra\.sweep\.dir={tmp_path}"
    with pytest.raises(IncompleteSweepError, match=f"did not end: CANCELLED; .*{advice}"):
        sweep.run(SimpleNamespace(), print)
    assert [job.state for job in sweep.jobs] == ["succeeded"] * 3


def test_pods_that_cannot_see_the_folder_are_refused(tmp_path):
    """They would end at once, for a reason that is in their log only."""
    with pytest.raises(ConfigError, match=r"hydra\.launcher\.mounts .* hydra\.sweep\.dir"):
        rounds_on_kubernetes(tmp_path, "/elsewhere")
