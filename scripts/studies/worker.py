"""The process of one study."""

from __future__ import annotations

import argparse
import importlib
import logging
import sys
import warnings
from pathlib import Path

from dlrm_sharded.files.errors import UserError
from studies.parts import run_commands
from studies.processes import module_command
from studies.study import Study, StudyRun


def worker_command(study: Study, package: str, out: Path, seconds: float, small: bool) -> list[str]:
    """Return the command that runs a study in a process of its own.

    Args:
        package: package of the module whose function `run` is the study, unless it has commands.
    """
    options = [f"--seconds={seconds}", *(["--small"] if small else [])]
    commands = study.small if small else study.commands
    if commands:
        options.append(f"--case-s={0 if small else study.case_s}")
    # argparse takes positional arguments in one row
    return module_command(__name__, *options, f"{package}.{study.name}", str(out), *commands)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("step")
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("commands", nargs="*", help="parts with options instead of a module")
    parser.add_argument("--case-s", type=float, default=0.0)
    options = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(name)s: %(message)s")
    logging.getLogger("dlrm_sharded").setLevel(logging.INFO)
    # TorchRec uses what torch deprecates; nobody here can change that.
    warnings.filterwarnings("ignore", category=FutureWarning, message=".*deprecat")
    name = options.step.rpartition(".")[2]
    run = StudyRun(name, options.out, seconds=options.seconds, small=options.small)
    try:
        if options.commands:
            run_commands(run, options.commands, case_s=options.case_s)
        else:
            importlib.import_module(options.step).run(run)
    except UserError as error:
        run.check(False, str(error))
    for failure in run.failures:
        print(f"failed: {failure}", file=sys.stderr)
    return 1 if run.failures else 0


if __name__ == "__main__":
    sys.exit(main())
