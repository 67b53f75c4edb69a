"""Run the command `dlrm-convert-criteo` from a checkout."""

import sys

from dlrm_sharded.commands.convert_criteo import main

if __name__ == "__main__":
    sys.exit(main())
