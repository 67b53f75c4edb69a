"""A Python that has loaded the libraries: the one starter of the processes that tests run.

Loading torch and TorchRec takes a process seconds. A server loads them once for all tests and all
their workers, and each command or rank is a fork of it:

server.py   loads the libraries, then forks for every request
client.py   the executable: passes its arguments, environment, folder, standard streams and ignored
            signals to the server, hands on signals, and ends as the fork does
ranks.py    runs a function as the ranks of a job

The server has loaded this checkout, too; a command with another PYTHONPATH loads its own. So it
differs from one of its own in little more than its parent. Tests of orphans, and of processes that
are found by name, start their own instead.
"""

import atexit
import functools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
START_LIMIT_S = 600
SHARED = "DLRM_SHARDED_TESTS_PYTHON"
"""Variable with the folder of the server that all workers use; the process above them sets it."""


class Ended(subprocess.CompletedProcess[str]):
    """A process that has ended, and all that it wrote."""

    @property
    def output(self) -> str:
        return self.stdout + self.stderr


def run(
    *arguments: str,
    cwd: Path = ROOT,
    env: Mapping[str, str] | None = None,
    timeout: float = 600,
    exit_code: int | None = None,
) -> Ended:
    """Run `python ARGUMENTS`, and the ranks that torchrun starts for it, as forks.

    Args:
        env: None for that of the tests.
        timeout: seconds after which it hangs, on a machine of any speed.
        exit_code: how it has to end, or the test fails; after a 2, an error of the user, also if
            there is a traceback. None for any end.
    """
    with start(*arguments, cwd=cwd, env=env, stderr=subprocess.PIPE) as process:
        try:
            stdout, stderr = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    ended = Ended(arguments, process.returncode, stdout, stderr)
    assert exit_code in (None, ended.returncode), ended.output
    assert exit_code != 2 or "Traceback" not in ended.stderr, ended.stderr
    assert "--- Logging error ---" not in ended.output, ended.output
    return ended


def start(
    *arguments: str,
    cwd: Path = ROOT,
    env: Mapping[str, str] | None = None,
    before: tuple[str, ...] = (),
    stdout: int | IO[str] | None = subprocess.PIPE,
    stderr: int | None = subprocess.STDOUT,
    own_process: bool = False,
) -> "subprocess.Popen[str]":
    """Start `python ARGUMENTS` in a session of its own, with one thread and without a GPU.

    Args:
        env: None for that of the tests.
        before: a command that starts the one given, such as nohup.
        own_process: give it, and its ranks, an interpreter of their own.
    """
    executable = sys.executable if own_process else python()
    return subprocess.Popen(
        [*before, executable, *arguments],
        cwd=cwd,
        env={**(os.environ if env is None else env), "PYTHON_EXEC": executable},
        stdout=stdout,
        stderr=stderr,
        text=True,
        start_new_session=True,
    )


@functools.cache
def python() -> str:
    """The path of the executable; its server starts with the first call and ends with the tests."""
    folder = Path(os.environ[SHARED]) if SHARED in os.environ else start_server()
    deadline = time.monotonic() + START_LIMIT_S
    while not (folder / "socket").exists():
        assert not (folder / "failed").exists(), "the server could not load the libraries"
        assert time.monotonic() < deadline, "the server did not start"
        time.sleep(0.05)
    return str(folder / "python")


def start_server() -> Path:
    """Begin to load the libraries; return the folder in which clients find the server."""
    made = tempfile.TemporaryDirectory(prefix="preloaded-")
    atexit.register(made.cleanup)
    folder = Path(made.name)
    address, executable = folder / "socket", folder / "python"
    client = f'exec "{sys.executable}" -I -S "{FOLDER / "client.py"}" "{address}" "$@"'
    executable.write_text(f"#!/bin/sh\n{client}\n")
    executable.chmod(0o755)
    without_path = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    server = subprocess.Popen(
        [sys.executable, str(FOLDER / "server.py"), str(address)],
        cwd="/",
        env=without_path | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        stdin=subprocess.DEVNULL,
    )
    atexit.register(server.kill)
    return folder
