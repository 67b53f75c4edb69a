"""Convert Criteo TSV files to the blocks that training reads: `dlrm-convert-criteo`.

    dlrm-convert-criteo data/train.txt --out data/criteo_kaggle
    dlrm-convert-criteo 'days/day_*.gz' --val-files 'days/day_23.gz' \
        --max-ind-range 40000000 --out data/criteo_1tb

The files may be compressed with gzip. A conversion that was stopped leaves `<out>.partial`, which
the next one discards.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys

from dlrm_sharded.commands.exit_codes import exit_codes
from dlrm_sharded.files.json_files import folder_to_write


def main() -> int:
    with exit_codes():
        options = _options()
        logging.basicConfig(format="%(message)s")
        logging.getLogger("dlrm_sharded").setLevel(logging.INFO)
        if options.threads:
            os.environ["POLARS_MAX_THREADS"] = str(options.threads)  # polars reads it at import
        from dlrm_sharded.datasets.blocks import BlockReader
        from dlrm_sharded.datasets.criteo import CriteoSource, convert

        max_ind_range = options.max_ind_range
        out = folder_to_write("--out", options.out)
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
        convert(source, out)
        manifest = BlockReader(out).manifest
        print(f"{options.out}: {manifest.num_rows:,} samples")
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", help="TSVs or globs, in the order of their rows")
    parser.add_argument("--out", required=True, help="folder to write")
    parser.add_argument(
        "--val-files", nargs="*", default=[], help="files for validation only, such as day_23"
    )
    parser.add_argument(
        "--val-share",
        type=float,
        default=1 / 7,
        help="share of the last rows for validation, without --val-files [1/7]",
    )
    parser.add_argument("--id-mapping", choices=["vocabulary", "hash"], default="vocabulary")
    parser.add_argument(
        "--min-count",
        type=int,
        default=3,
        help="ids that occur less often share one row [%(default)s]",
    )
    parser.add_argument(
        "--max-ind-range",
        type=int,
        nargs="+",
        default=[],
        help="take ids modulo this: one number, or one for each of the 26 tables",
    )
    parser.add_argument(
        "--block-rows", type=int, default=2048, help="samples per block [%(default)s]"
    )
    parser.add_argument(
        "--max-malformed-share",
        type=float,
        default=0.001,
        help="share of a file's lines that may be malformed [%(default)s]",
    )
    parser.add_argument("--threads", type=int, help="threads that parse; by default one per core")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
