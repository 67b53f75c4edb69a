"""What tests of launching share: a small Hydra application, and sweeps of it."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import preloaded

APPLICATION = """
import os, signal, time
from pathlib import Path
import hydra

def wait_for(path):
    deadline = time.monotonic() + 600
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not come"
        time.sleep(0.05)

def fail_once(folder, rank):
    first = folder / f"first_{rank}"
    if not first.exists():
        first.touch()
        wait_for(folder / f"first_{1 - rank}")  # or it is ended before it has tried
        raise ValueError("the first time")

@hydra.main(version_base="1.3", config_path=None)
def main(cfg):
    folder = Path(cfg.folder)
    rank = int(os.environ["RANK"])
    match cfg.do:
        case "succeed":
            return 3.0
        case "raise":
            raise ValueError(f"no luck on rank {rank}")
        case "raise_on_1":
            if rank == 1:
                raise ValueError(f"no luck on rank {rank}")
            time.sleep(60)
        case "raise_on_1_after_0":
            if rank == 1:
                said = folder / "sweep" / ".torchx" / "0"
                wait_for(said / f"return_{os.environ['MASTER_PORT']}.pickle")
                raise ValueError(f"no luck on rank {rank}")
            return 3.0
        case "read_environment":
            return float(os.environ["NUMBER"])
        case "write_environment":
            (folder / f"value_{rank}").write_text(os.environ["VALUE"])
            return 0.0
        case "raise_then_die":
            fail_once(folder, rank)
            os.kill(os.getpid(), signal.SIGKILL)
        case "exit":
            raise SystemExit(7)
        case "die_on_1":
            if rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(60)
        case "hang":
            print("this job hangs", flush=True)
            (folder / f"hangs_{rank}").touch()
            time.sleep(60)
        case "meet_a" | "meet_b":
            (folder / cfg.do).touch()
            wait_for(folder / ("meet_b" if cfg.do == "meet_a" else "meet_a"))
            return 1.0
        case "count":
            with (folder / f"starts_{rank}").open("a") as starts:
                starts.write("x")
            return 4.0
        case "succeed_when_resumed":
            if os.environ.get("DLRM_SHARDED_RESTARTS", "0") == "0":
                raise ValueError("the first time")
            return float(cfg.resume == "auto")
        case "succeed_at_second":
            fail_once(folder, rank)
            return 2.0

if __name__ == "__main__":
    main()
"""


LISTENING = ("env", "--default-signal=INT,TERM,HUP")
"""Before a command that is to be stopped: tests may run where signals are ignored."""


@pytest.fixture
def application(tmp_path: Path) -> Path:
    path = tmp_path / "application.py"
    path.write_text(APPLICATION)
    return path


@pytest.fixture
def sweep_command(application: Path, tmp_path: Path) -> Callable[..., list[str]]:
    """Arguments of Python for a sweep of the application into `tmp_path / "sweep"`."""

    def command(*overrides: str) -> list[str]:
        return [
            *(str(application), "-m", "hydra/launcher=torchx"),
            *(f"+folder={tmp_path}", f"hydra.sweep.dir={tmp_path / 'sweep'}", *overrides),
        ]

    return command


@pytest.fixture
def run_sweep(
    sweep_command: Callable[..., list[str]], tmp_path: Path
) -> Callable[..., preloaded.Ended]:
    def run(*overrides: str, exit_code: int = 0) -> preloaded.Ended:
        env = os.environ | {"HYDRA_FULL_ERROR": "1"}
        command = sweep_command(*overrides)
        return preloaded.run(*command, cwd=tmp_path, env=env, exit_code=exit_code)

    return run


def jobs_of(sweep_dir: Path) -> list[dict[str, Any]]:
    return json.loads((sweep_dir / "sweep.json").read_text())["jobs"]


def states_of(sweep_dir: Path) -> list[str]:
    return [job["state"] for job in jobs_of(sweep_dir)]
