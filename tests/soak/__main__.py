"""Interrupt training runs at random moments for a long time: `make soak ARGS="--number 50"`.

The exit code is 1 if a promise was broken. The results are in docs/notes/reliability.md.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from tests.soak.interruptions import interrupt_runs


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak")
    parser.add_argument("--number", type=int, default=50, help="interruptions [%(default)s]")
    parser.add_argument("--per-run", type=int, default=5, help="... of one run [%(default)s]")
    parser.add_argument("--seed", type=int, default=0, help="seed of the moments [%(default)s]")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="soak_") as folder:
        found = interrupt_runs(
            Path(folder), options.number, per_run=options.per_run, seed=options.seed
        )
    for (kind, moment), number in sorted(found.interruptions.items()):
        print(f"{kind}, {moment}: {number}")
    print("\n".join(f"fault: {fault}" for fault in found.faults) or "no faults")
    return 1 if found.faults else 0


if __name__ == "__main__":
    sys.exit(main())
