"""Write an invented TSV file in Criteo's format, with labels that can be learned.

dlrm-make-criteo-tsv data/sample.tsv --rows 300000
"""

from __future__ import annotations

import argparse
from pathlib import Path

from dlrm_sharded.commands.exit_codes import exit_codes
from dlrm_sharded.datasets.criteo_sample import write_criteo_sample


def main() -> None:
    with exit_codes():
        parser = argparse.ArgumentParser(
            description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        parser.add_argument("out", type=Path, help="file to write")
        parser.add_argument(
            "--rows", type=int, default=300_000, help="number of rows [%(default)s]"
        )
        parser.add_argument("--seed", type=int, default=0, help="seed of the rows [%(default)s]")
        options = parser.parse_args()
        write_criteo_sample(options.out, num_rows=options.rows, seed=options.seed)
        print(f"{options.out}: {options.rows:,} rows, {options.out.stat().st_size:,} B")


if __name__ == "__main__":
    main()
