"""The one starter of processes: scripts, ranks of a job, and commands tied to this process.

Linux ends a tied command when the process that started it dies, however it dies.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from dlrm_sharded.ranks.process import die_with_parent

SCRIPTS = Path(__file__).resolve().parents[1]
NUM_LAST_CHARACTERS = 2000


def run_python(*arguments: str) -> None:
    """Run `python ARGUMENTS` with one thread, without its output.

    Raises:
        RuntimeError: it failed; the message has the end of what it wrote.
    """
    paths = filter(None, [str(SCRIPTS), os.environ.get("PYTHONPATH")])
    environment = {"OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1", **os.environ}
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    done = subprocess.run([sys.executable, *arguments], env=environment, capture_output=True)
    if done.returncode:
        end = done.stderr.decode(errors="replace")[-NUM_LAST_CHARACTERS:]
        raise RuntimeError(f"{' '.join(arguments)} failed:\n{end}")


def quiet() -> None:
    """Silence warnings that come with every plan, such as that the cost model extrapolates."""
    for package in ("dlrm_sharded", "torchrec"):
        logging.getLogger(package).setLevel(logging.ERROR)


def module_command(module: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", module, *arguments]


def tied_command(command: Sequence[str]) -> list[str]:
    """Return the command that runs another one as a child that ends with this process."""
    return module_command("studies.processes", str(os.getpid()), *command)


def main(parent: int, command: Sequence[str]) -> None:
    """Become the command, which inherits the setting."""
    die_with_parent()
    if os.getppid() != parent:
        sys.exit(f"process {parent} died before it could be waited for")
    os.execvp(command[0], list(command))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
