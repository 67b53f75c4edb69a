"""A fork of the preloaded Python ends, speaks and dies as a process of its own does."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import preloaded

PROGRAM = """
import os, sys, time
from pathlib import Path
print(__name__, sys.argv[1:], os.environ["WORD"], Path.cwd())
match sys.argv[1]:
    case "exit":
        sys.exit(7)
    case "message":
        sys.exit("no luck")
    case "raise":
        raise ValueError("no luck")
    case "die":
        os.kill(os.getpid(), 9)
    case "wait":
        Path("pid").write_text(str(os.getpid()))
        time.sleep(600)
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    (tmp_path / "program.py").write_text(PROGRAM)
    return tmp_path / "program.py"


@pytest.mark.parametrize("how", ["end", "exit", "message", "raise", "die"])
@pytest.mark.parametrize("by_name", [False, True], ids=["script", "module"])
def test_ends_like_a_process(how: str, by_name: bool, program: Path) -> None:
    arguments = ["-u", *(["-m", "program"] if by_name else [str(program)]), how]
    env = {**os.environ, "WORD": "here"}
    done = preloaded.run(*arguments, cwd=program.parent, env=env)
    own = subprocess.run(
        [sys.executable, *arguments],
        cwd=program.parent,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (own.returncode, own.stdout)
    assert done.stderr.splitlines()[-1:] == own.stderr.splitlines()[-1:]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_to_the_client_reaches_the_fork(number: int, program: Path) -> None:
    process = subprocess.Popen(
        [preloaded.python(), str(program), "wait"],
        cwd=program.parent,
        env={**os.environ, "WORD": "here"},
        stdout=subprocess.DEVNULL,
    )
    while not (text := _read(program.with_name("pid"))):
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(number)
    assert process.wait() == -number
    while Path(f"/proc/{text}").exists():
        time.sleep(0.05)


def _read(path: Path) -> str:
    return path.read_text() if path.exists() else ""
