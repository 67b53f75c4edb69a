"""Run the command `dlrm-export` from a checkout."""

import sys

from dlrm_sharded.commands.export import main

if __name__ == "__main__":
    sys.exit(main())
