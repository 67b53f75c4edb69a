"""Write an invented TSV file in Criteo's format, with labels that can be learned.

dlrm-make-criteo-tsv data/sample.tsv --rows 300000
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from dlrm_sharded.commands.exit_codes import exit_codes
from dlrm_sharded.files.errors import ConfigError
from dlrm_sharded.files.json_files import is_written_through


def main() -> int:
    with exit_codes():
        parser = argparse.ArgumentParser(
            description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        parser.add_argument("out", help="file to write; - is standard output")
        parser.add_argument(
            "--rows", type=int, default=300_000, help="number of rows [%(default)s]"
        )
        parser.add_argument("--seed", type=int, default=0, help="seed of the rows [%(default)s]")
        options = parser.parse_args()
        from dlrm_sharded.datasets.criteo_sample import write_criteo_sample  # loads torch

        try:
            is_stream = is_written_through(options.out)
            write_criteo_sample(options.out, num_rows=options.rows, seed=options.seed)
        except BrokenPipeError:
            raise
        except OSError as error:
            raise ConfigError(f"cannot write {options.out}: {error.strerror}") from error
        written = f"{options.out}: {options.rows:,} rows"
        if is_stream:
            print(written, file=sys.stderr)
        else:
            print(f"{written}, {Path(options.out).stat().st_size:,} B")
    return 0


if __name__ == "__main__":
    sys.exit(main())
