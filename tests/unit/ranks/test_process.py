"""Processes that lose their parent, and the memory that they had."""

import mmap
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from dlrm_sharded.files.errors import ConfigError
from dlrm_sharded.ranks.process import check_threads, forget_peak_memory

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


@pytest.mark.parametrize("threads", ["4", " +4 ", "4,2", " "])
def test_threads_that_openmp_takes(threads, monkeypatch):
    """No threads are as if unset."""
    monkeypatch.setenv("OMP_NUM_THREADS", threads)
    check_threads()
    assert os.environ.get("OMP_NUM_THREADS", " ") == threads


@pytest.mark.parametrize("threads", ["0", "abc", "2.5", "0,4"])
def test_threads_that_openmp_ignores(threads, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", threads)
    with pytest.raises(ConfigError, match=f"OMP_NUM_THREADS is '{threads}'"):
        check_threads()
