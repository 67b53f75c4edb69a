"""Run the command `dlrm-make-tasks` from a checkout."""

import sys

from dlrm_sharded.commands.make_tasks import main

if __name__ == "__main__":
    sys.exit(main())
