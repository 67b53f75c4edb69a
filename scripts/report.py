"""Run the command `dlrm-report` from a checkout."""

import sys

from dlrm_sharded.commands.report import main

if __name__ == "__main__":
    sys.exit(main())
