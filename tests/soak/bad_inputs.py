"""Give the commands thousands of wrong inputs, and count what becomes of them."""

from __future__ import annotations

import argparse
import collections
import logging
import time

from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.soak.input_kinds import GOOD, KINDS, OUTCOMES, Outcome, outcome

MAX_SHOWN_FAULTS = 20
"""Number of different faults that are shown in full."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--examples", type=int, default=5000, help="in all [%(default)s]")
    parser.add_argument("--kinds", help=f"some of {','.join(KINDS)}, with commas; all by default")
    parser.add_argument("--seed", type=int, default=0, help="other inputs [%(default)s]")


def run(options: argparse.Namespace) -> int:
    """Print the counts, and return 1 if an input ended with a traceback or a hang."""
    logging.disable(logging.CRITICAL)
    names = options.kinds.split(",") if options.kinds else list(KINDS)
    weights = sum(KINDS[name].weight for name in names)
    faults: dict[str, str] = {}
    print(f"{'kind':12} {'tried':>6} " + " ".join(f"{name:>13}" for name in OUTCOMES) + "  seconds")
    for name in names:
        started = time.monotonic()
        share = -(-options.examples * KINDS[name].weight // weights)
        counts = _count(name, share, options.seed, faults)
        cells = " ".join(f"{counts[column]:13,}" for column in OUTCOMES)
        seconds = time.monotonic() - started
        print(f"{name:12} {counts.total():6,} {cells} {seconds:8.0f}", flush=True)
    for where, text in list(faults.items())[:MAX_SHOWN_FAULTS]:
        print(f"\n{where}\n{text}")
    return 1 if faults else 0


def _count(
    name: str, num_examples: int, number: int, faults: dict[str, str]
) -> collections.Counter[str]:
    """Count the outcomes of inputs of a kind, and note one input of every different fault."""
    kind = KINDS[name]
    counts: collections.Counter[str] = collections.Counter()

    @seed(number)
    @settings(
        max_examples=num_examples,
        phases=[Phase.generate],
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(kind.inputs())
    def try_one(value: object) -> None:
        found: Outcome = outcome(kind, value)
        counts[found.name] += 1
        if found.name not in GOOD:
            key = f"{name}: {found.name}: {found.text.strip().splitlines()[-1][:150]}"
            faults.setdefault(key, f"input: {value!r:.2000}\n{found.text[-3000:]}")

    try_one()
    return counts
