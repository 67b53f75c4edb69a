"""Compares training with exchanges in another precision with that in fp32.

Both train the same model over the same seeds, in turn. A precision passes if the interval of the
mean difference between runs of one seed lies within the spread of the seeds in fp32.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from scipy.stats import t

from dlrm_sharded.files.json_files import read_json_object

QUALITIES = ("loss", "normalized_entropy")
"""Keys of result.json that are compared; smaller is better."""

CONFIDENCE = 0.95


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seeds", type=int, default=6, help="seeds of both [%(default)s]")
    parser.add_argument(
        "--precision", default="fp16", help="value of exchange_precision [%(default)s]"
    )
    parser.add_argument("overrides", nargs="*", help="overrides of dlrm-train, for both")


@dataclass(frozen=True, slots=True)
class Difference:
    """The difference of a quality between runs that share a seed, and the spread of seeds in fp32.

    Args:
        mean: mean of the differences; positive where the other precision is worse.
        half_width: half of the interval of the mean, at a confidence of 95 %.
        spread: standard deviation over the seeds in fp32.
    """

    mean: float
    half_width: float
    spread: float

    @classmethod
    def of_runs(cls, exact: Sequence[float], other: Sequence[float]) -> Difference:
        """Compare runs in the order of their seeds, of which there are at least two."""
        differences = [b - a for a, b in zip(exact, other, strict=True)]
        deviation = statistics.stdev(differences) / math.sqrt(len(differences))
        quantile = float(t.ppf((1 + CONFIDENCE) / 2, len(differences) - 1))
        return cls(statistics.mean(differences), quantile * deviation, statistics.stdev(exact))

    @property
    def verdict(self) -> str:
        """Return what the runs show."""
        low, high = self.mean - self.half_width, self.mean + self.half_width
        if -self.spread <= low and high <= self.spread:
            return "within the spread of seeds"
        if low > self.spread:
            return "worse than the spread of seeds"
        if high < -self.spread:
            return "better than the spread of seeds"
        return "not decided: use more seeds"


def run(options: argparse.Namespace) -> None:
    if options.seeds < 2:
        raise SystemExit("--seeds must be 2 or more: one seed has no spread")
    runs: dict[str, list[dict[str, float]]] = {"fp32": [], options.precision: []}
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(options.seeds):
            # the first one in turn, so that neither gains from the order
            for precision in sorted(runs, reverse=bool(seed % 2)):
                found = _trained(options, precision, seed, Path(folder) / f"{seed}-{precision}")
                runs[precision].append(found)
                figures = ", ".join(f"{key} {value:.6f}" for key, value in found.items())
                print(f"seed {seed}, {precision}: {figures}", flush=True)
    for quality in QUALITIES:
        exact, other = ([found[quality] for found in of_one] for of_one in runs.values())
        difference = Difference.of_runs(exact, other)
        print(
            f"{quality}: fp32 {statistics.mean(exact):.6f}, spread {difference.spread:.6f}; "
            f"{options.precision} differs by {difference.mean:+.6f} +- {difference.half_width:.6f}:"
            f" {difference.verdict}"
        )


def _trained(
    options: argparse.Namespace, precision: str, seed: int, run_dir: Path
) -> dict[str, float]:
    """Train once and return the qualities; CalledProcessError if the run failed."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*torchrun, "--nproc-per-node", str(options.ranks), "-m", "dlrm_sharded.train"]
    overrides = [
        *("sharder=dim", "journal=none"),  # one plan for all runs
        *options.overrides,
        *(f"exchange_precision={precision}", f"seed={seed}", f"hydra.run.dir={run_dir}"),
    ]
    subprocess.run(
        [*command, *overrides],
        env={"OMP_NUM_THREADS": "1", **os.environ},
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    result = read_json_object(run_dir / "result.json", noun="result")
    return {quality: float(result[quality]) for quality in QUALITIES}
