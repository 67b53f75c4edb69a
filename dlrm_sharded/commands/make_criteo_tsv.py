"""Write an invented TSV file in Criteo's format, with labels that can be learned.

    dlrm-make-criteo-tsv data/sample.tsv rows=300000 seed=0

The file - is standard output.
"""

from __future__ import annotations

import sys
from pathlib import Path

from dlrm_sharded.commands.exit_codes import exit_codes
from dlrm_sharded.commands.words import read_words
from dlrm_sharded.files.errors import ConfigError
from dlrm_sharded.files.json_files import is_written_through


def main() -> int:
    with exit_codes():
        keys = {"rows": (int, 300_000), "seed": (int, 0)}
        asked = read_words(__doc__, keys, names="the file to write")
        out, *others = asked.names
        if others:
            raise ConfigError(f"name one file to write; {others[0]!r} has no effect")
        from dlrm_sharded.datasets.criteo_sample import write_criteo_sample  # loads torch

        try:
            is_stream = is_written_through(out)
            write_criteo_sample(out, num_rows=asked.rows, seed=asked.seed)
        except BrokenPipeError:
            raise
        except OSError as error:
            raise ConfigError(f"cannot write {out}: {error.strerror}") from error
        written = f"{out}: {asked.rows:,} rows"
        if is_stream:
            print(written, file=sys.stderr)
        else:
            print(f"{written}, {Path(out).stat().st_size:,} B")
    return 0


if __name__ == "__main__":
    sys.exit(main())
