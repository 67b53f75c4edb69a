"""Measure the figures of docs/benchmark.md and docs/notes/measurements.md on this machine.

python scripts/benchmark.py             docs/benchmark.md: all sharders, goes on where it ended
python scripts/benchmark.py all --small a rehearsal of it in two minutes
python scripts/benchmark.py data        Criteo: rows/s converted and served
python scripts/benchmark.py loop        the trainer's loop against a bare one
python scripts/benchmark.py plain       training against a plain TorchRec script
python scripts/benchmark.py plans       sharders side by side under one cost model
python scripts/benchmark.py measured    measured costs of the sharders' plans
python scripts/benchmark.py policies    the papers' policies alone against the heuristics
python scripts/benchmark.py elsewhere   prices on other hardware, after runs and calibrations
python scripts/benchmark.py made_up     first starts, journals and policies on made-up hardware
python scripts/benchmark.py priors      priors of GPUs against public measurements
python scripts/benchmark.py steps       predicted whole steps against measured ones
python scripts/benchmark.py cluster     a large model on simulated ranks
python scripts/benchmark.py predictions the search on a cost model that only predicts
python scripts/benchmark.py sweeps      what sweeps tell apart, in rounds and apart
python scripts/benchmark.py stalls      iterations of a loop beside the writer of a checkpoint
python scripts/benchmark.py odd         whether any sharder beats neuroshard on odd tasks
python scripts/benchmark.py sequences   stages of bags and sequences, predicted and measured
python scripts/benchmark.py modules     steps of bags, sequences or both, beside TorchRec
python scripts/benchmark.py table_order lookups in the order of the model, and in drawn ones
python scripts/benchmark.py exact       plans and bounds beside the cheapest plans of small tasks
python scripts/benchmark.py groups      groups of ranks, each with all tables, beside one plan
python scripts/benchmark.py host        what a step takes of the host, beside TorchRec

With --jsonl FILE a part keeps each case as it ends, and the same command goes on after a kill.

Sharders are compared by sweeps: make sweep ARGS="seed=0,1,2,3"
"""

from __future__ import annotations

import argparse
import os
import sys

from benchmarks import whole
from dlrm_sharded.files.errors import ConfigError
from studies.parts import add_part_arguments, part_of, run_part

WHOLE = "all"
PARTS = (
    *("data", "loop", "plain", "plans", "measured", "policies", "elsewhere"),
    *("made_up", "odd", "exact", "groups", "sequences", "modules", "table_order"),
    *("priors", "steps", "cluster", "predictions", "sweeps", "stalls", "host"),
)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = parser.add_subparsers(dest="part", required=True)
    whole.add_arguments(parts.add_parser(WHOLE, help=whole.__doc__))
    for name in PARTS:
        part = part_of(name)
        add_part_arguments(parts.add_parser(name, help=part.__doc__), part)
    options = parser.parse_args(sys.argv[1:] or [WHOLE])
    load = ", ".join(f"{x:.2f}" for x in os.getloadavg())
    print(f"{os.cpu_count()} cores; load average before: {load}", flush=True)
    try:
        if options.part == WHOLE:
            return whole.run(options)
        run_part(part_of(options.part), options)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
