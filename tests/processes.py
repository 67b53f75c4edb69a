"""What tests ask of processes on this machine."""

import time
from collections.abc import Callable
from pathlib import Path


def wait_until(condition: Callable[[], object], what: str, timeout_s: float = 600) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain until {what}"
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    """Whether it has not ended; a parent that has not asked yet makes no difference."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def children_of(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(c) for t in tasks for c in (t / "children").read_text().split()]
