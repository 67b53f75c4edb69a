"""Run the command `dlrm-make-criteo-tsv` from a checkout."""

import sys

from dlrm_sharded.commands.make_criteo_tsv import main

if __name__ == "__main__":
    sys.exit(main())
