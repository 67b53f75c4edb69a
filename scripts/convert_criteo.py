"""Converts Criteo TSVs, plain or gzip, to a folder of blocks that training reads.

    python scripts/convert_criteo.py data/train.txt --out data/criteo_kaggle
    python scripts/convert_criteo.py 'days/day_*.gz' --val-files 'days/day_23.gz' \
        --max-ind-range 40000000 --out data/criteo_1tb

A conversion that was stopped leaves `<out>.partial`, which the next one discards.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from pathlib import Path

from dlrm_sharded.errors import UserError


def main() -> int:
    options = _options()
    logging.basicConfig(format="%(message)s")
    logging.getLogger("dlrm_sharded").setLevel(logging.INFO)
    if options.threads:
        os.environ["POLARS_MAX_THREADS"] = str(options.threads)  # read when polars is imported
    from dlrm_sharded.datasets.blocks import Blocks
    from dlrm_sharded.datasets.criteo import CriteoSource, convert

    max_ind_range = options.max_ind_range
    try:
        source = CriteoSource(
            options.files,
            val_files=options.val_files,
            val_share=options.val_share,
            id_mapping=options.id_mapping,
            min_count=options.min_count,
            max_ind_range=max_ind_range[0] if len(max_ind_range) == 1 else max_ind_range or None,
            block_rows=options.block_rows,
            max_malformed_share=options.max_malformed_share,
        )
        convert(source, options.out)
        manifest = Blocks(options.out).manifest
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{options.out}: {manifest.num_rows:,} samples")
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", help="TSVs or globs, in the order of their rows")
    parser.add_argument("--out", type=Path, required=True, help="folder to make")
    parser.add_argument("--val-files", nargs="*", default=[], help="validation only, e.g. day_23")
    parser.add_argument(
        "--val-share", type=float, default=1 / 7, help="last rows, if no --val-files [1/7]"
    )
    parser.add_argument("--id-mapping", choices=["vocabulary", "hash"], default="vocabulary")
    parser.add_argument(
        "--min-count", type=int, default=3, help="rarer ids share one row [%(default)s]"
    )
    parser.add_argument(
        "--max-ind-range", type=int, nargs="+", default=[], help="ids modulo this; 1 or 26 numbers"
    )
    parser.add_argument(
        "--block-rows", type=int, default=2048, help="samples per block [%(default)s]"
    )
    parser.add_argument(
        "--max-malformed-share", type=float, default=0.001, help="of a file's lines [%(default)s]"
    )
    parser.add_argument("--threads", type=int, help="for parsing; all cores if not given")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
