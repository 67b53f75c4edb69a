"""Tests that take long: Hydra's suites for jobs of every shape, and a rehearsal that is killed."""

from __future__ import annotations

import argparse
import subprocess
import sys

from tests.preloaded import ROOT


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("selection", nargs="*", default=["tests"], help="files or tests [all]")


def run(options: argparse.Namespace) -> int:
    """Run what is marked `soak`, and return pytest's exit code."""
    pytest = [sys.executable, "-m", "pytest", "-m", "soak", "--verbose"]
    return subprocess.run([*pytest, *options.selection], cwd=ROOT, check=False).returncode
