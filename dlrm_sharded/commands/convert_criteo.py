"""Convert Criteo TSV files to the blocks that training reads: `dlrm-convert-criteo`.

    dlrm-convert-criteo data/train.txt out=data/criteo_kaggle
    dlrm-convert-criteo 'days/day_*.gz' val_files='days/day_23.gz' \
        max_ind_range=40000000 out=data/criteo_1tb

The files, or globs, are in the order of their rows, and may be compressed with gzip. A conversion
that was stopped leaves `<out>.partial`, which the next one discards.

    out                   folder to write
    val_files             files for validation only: [day_22.gz,day_23.gz]
    val_share             share of the last rows for validation, without val_files [1/7]
    id_mapping            vocabulary or hash [vocabulary]
    min_count             ids that occur less often share one row [3]
    max_ind_range         take ids modulo this: one number, or one for each of the 26 tables
    block_rows            samples per block [2048]
    max_malformed_share   share of a file's lines that may be malformed [0.001]
    threads               threads that parse; by default one per core
"""

from __future__ import annotations

import logging
import os
import sys

from dlrm_sharded.commands.exit_codes import exit_codes
from dlrm_sharded.commands.words import read_words
from dlrm_sharded.files.errors import check_count
from dlrm_sharded.files.json_files import folder_to_write

KEYS = (
    *("out", "threads", "val_files", "val_share", "id_mapping", "min_count", "max_ind_range"),
    *("block_rows", "max_malformed_share"),
)


def main() -> int:
    with exit_codes():
        files, keys = read_words(__doc__, KEYS, names="the TSV files to convert")
        out = folder_to_write("out", keys.pop("out", None))
        logging.basicConfig(format="%(message)s")
        logging.getLogger("dlrm_sharded").setLevel(logging.INFO)
        if (threads := keys.pop("threads", None)) is not None:
            check_count("threads", threads, least=1)
            os.environ["POLARS_MAX_THREADS"] = str(threads)  # polars reads it at import
        from dlrm_sharded.datasets.block_reader import BlockReader
        from dlrm_sharded.datasets.criteo import CriteoSource, convert

        convert(CriteoSource(files, **keys), out)
        print(f"{out}: {BlockReader(out).manifest.num_rows:,} samples")
    return 0


if __name__ == "__main__":
    sys.exit(main())
