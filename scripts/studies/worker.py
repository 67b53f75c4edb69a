"""The process of one study."""

from __future__ import annotations

import argparse
import importlib
import logging
import sys
import warnings
from pathlib import Path

from dlrm_sharded.files.errors import UserError
from studies.processes import module_command
from studies.study import StudyRun


def worker_command(step: str, out: Path, seconds: float, small: bool) -> list[str]:
    """Return the command that runs a study in a process of its own.

    Args:
        step: module whose function `run` is the study; its last part is the study's name.
    """
    rehearses = ["--small"] if small else []
    return module_command(__name__, step, str(out), f"--seconds={seconds}", *rehearses)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("step")
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(name)s: %(message)s")
    logging.getLogger("dlrm_sharded").setLevel(logging.INFO)
    # TorchRec uses what torch deprecates; nobody here can change that.
    warnings.filterwarnings("ignore", category=FutureWarning, message=".*deprecat")
    name = options.step.rpartition(".")[2]
    run = StudyRun(name, options.out, seconds=options.seconds, small=options.small)
    step = importlib.import_module(options.step)
    try:
        step.run(run)
    except UserError as error:
        run.check(False, str(error))
    for failure in run.failures:
        print(f"failed: {failure}", file=sys.stderr)
    return 1 if run.failures else 0


if __name__ == "__main__":
    sys.exit(main())
