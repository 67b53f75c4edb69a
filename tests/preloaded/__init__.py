"""A Python that has loaded the libraries, for tests that start many commands.

Loading torch and TorchRec takes a process seconds. A server loads them once for all tests, and each
command is a fork of it:

server.py   loads the libraries, then forks for every request
client.py   the executable: passes its arguments, environment, folder and standard streams to the
            server, hands on signals, and ends as the fork does

Project modules are loaded by the fork, so a command differs from one of its own in little more than
its parent. Tests of kills, hangs and orphans start processes of their own instead.
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

FOLDER = Path(__file__).parent
START_LIMIT_S = 300


def run(
    *arguments: str, cwd: Path, env: Mapping[str, str] | None = None, timeout: float = 150
) -> subprocess.CompletedProcess[str]:
    """Run `python ARGUMENTS`, and the ranks that torchrun starts for it, as forks.

    Args:
        env: None for that of the tests.
    """
    return subprocess.run(
        [python(), *arguments],
        cwd=cwd,
        env={**(os.environ if env is None else env), "PYTHON_EXEC": python()},
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout,
    )


@functools.cache
def python() -> str:
    """The path of the executable; its server starts with the first call and ends with the tests."""
    folder = tempfile.TemporaryDirectory(prefix="preloaded-")
    atexit.register(folder.cleanup)
    address, executable = Path(folder.name) / "socket", Path(folder.name) / "python"
    without_path = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    server = subprocess.Popen(
        [sys.executable, str(FOLDER / "server.py"), str(address)],
        cwd="/",
        env=without_path | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        stdin=subprocess.DEVNULL,
    )
    atexit.register(server.kill)
    client = f'exec "{sys.executable}" -I -S "{FOLDER / "client.py"}" "{address}" "$@"'
    executable.write_text(f"#!/bin/sh\n{client}\n")
    executable.chmod(0o755)
    deadline = time.monotonic() + START_LIMIT_S
    while not address.exists():
        assert server.poll() is None, "the server ended"
        assert time.monotonic() < deadline, "the server did not start"
        time.sleep(0.05)
    return str(executable)
