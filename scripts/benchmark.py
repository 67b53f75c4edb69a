"""Compare sharders, and measure what training costs beside plain TorchRec. Tables are printed.

python scripts/benchmark.py plans                   dlrm-compare on sets of tasks
python scripts/benchmark.py plans --sets paper neuroshard_table_1 sharders=[search,torchrec]
python scripts/benchmark.py sweep                   train with every sharder and compare the runs

Arguments with "=" are handed on to dlrm-compare or to dlrm-train.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from dlrm_sharded.datasets.task_sets import TASK_SETS

PRESETS = Path(__file__).resolve().parents[1] / "conf" / "preset"
SETS = ("paper", "feasibility", "scale_whole", "models")
SWEEP = ("dlrm_sharded.train", "-m", "sharder=glob(*,exclude=plan_file)")


def compare_commands(sets: Sequence[str], out: Path, overrides: Sequence[str]) -> list[list[str]]:
    """Return a command for each preset or task set; its results are in a folder below `out`."""
    presets = {path.stem for path in PRESETS.glob("*.yaml")}
    unknown = [name for name in sets if name not in presets and name not in TASK_SETS]
    if unknown:
        raise SystemExit(
            f"error: no preset or task set is named {', '.join(unknown)}; "
            f"known: {', '.join(sorted(presets | TASK_SETS.keys()))}"
        )
    return [
        [
            "dlrm_sharded.commands.compare",
            f"preset={name}" if name in presets else f"task_set={name}",
            f"out={out / name}",
            *overrides,
        ]
        for name in sets
    ]


def run_modules(commands: Sequence[Sequence[str]]) -> int:
    """Run Python modules one after another, and return the first exit code that is not 0."""
    codes = [subprocess.run([sys.executable, "-m", *words]).returncode for words in commands]
    return next(filter(None, codes), 0)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = parser.add_subparsers(dest="part", required=True)
    plans = parts.add_parser("plans", help="dlrm-compare on presets and task sets")
    plans.add_argument("--sets", nargs="+", default=SETS, help="default: %(default)s")
    plans.add_argument("--out", type=Path, default=Path("comparison"), help="default: %(default)s")
    sweep = parts.add_parser("sweep", help="train with every sharder")
    sweep.add_argument("--ranks", type=int, default=2, help="of each run; default: %(default)s")
    options, words = parser.parse_known_args()
    if wrong := [word for word in words if "=" not in word]:
        parser.error(f"unknown arguments: {' '.join(wrong)}")
    if options.part == "plans":
        return run_modules(compare_commands(options.sets, options.out, words))
    return run_modules([[*SWEEP, f"hydra.launcher.j=1x{options.ranks}", *words]])


if __name__ == "__main__":
    sys.exit(main())
