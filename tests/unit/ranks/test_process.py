"""Processes that lose their parent, and the memory that they had."""

import mmap
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from dlrm_sharded.ranks.process import forget_peak_memory, quiet_without_reader

CHILD = """
import os, time
from dlrm_sharded.ranks.process import PARENT, die_with_parent
os.write({ready}, b".")
while os.getppid() == PARENT:
    time.sleep(0.01)
print("orphan", flush=True)
die_with_parent()
print("alive", flush=True)
"""
PARENT = """
import os, subprocess, sys
read, ready = os.pipe()
code = {code!r}.format(ready=ready)
subprocess.Popen([sys.executable, "-c", code], pass_fds=[ready])
os.close(ready)
os.read(read, 1)
os._exit(0)
"""


def test_a_parent_that_died_before():
    """Linux sends a signal only to those who ask before."""
    done = subprocess.run(
        [sys.executable, "-c", PARENT.format(code=CHILD)],
        capture_output=True,  # it ends when the child, which inherits it, has ended
        text=True,
        check=True,
        timeout=600,
    )
    assert (done.stdout, done.stderr) == ("orphan\n", "")


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux cannot reset it")
def test_forgets_the_peak():
    size = 200 * 2**20
    with mmap.mmap(-1, size) as block:  # the heap may keep what is freed
        block.write(b"x" * size)
        forget_peak_memory()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    forget_peak_memory()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < before - size / 2**11


def test_a_command_may_have_no_standard_output(monkeypatch):
    monkeypatch.setattr("sys.stdout", None)
    with quiet_without_reader():
        pass
