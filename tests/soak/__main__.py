"""Try for a long time what runs promise.

python -m tests.soak interruptions    runs that are killed at random moments go on
python -m tests.soak damage           damaged checkpoints are recognised and passed over
python -m tests.soak resharding       other plans and numbers of ranks read the same state

The exit code is 1 if a promise was broken. The results are in docs/notes/reliability.md.
"""

from __future__ import annotations

import argparse
import os
import sys

from tests.soak import damage, interruptions, resharding

PARTS = {
    "interruptions": interruptions,
    "damage": damage,
    "resharding": resharding,
}


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.soak",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parts = parser.add_subparsers(dest="part", required=True)
    for name, part in PARTS.items():
        part.add_arguments(parts.add_parser(name, help=part.__doc__))
    options = parser.parse_args()
    load = ", ".join(f"{x:.2f}" for x in os.getloadavg())
    print(f"{os.cpu_count()} cores; load average before: {load}", flush=True)
    return PARTS[options.part].run(options)


if __name__ == "__main__":
    sys.exit(main())
