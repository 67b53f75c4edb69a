"""Run the command `dlrm-collect-costs` from a checkout."""

from dlrm_sharded.commands.collect_costs import main

if __name__ == "__main__":
    main()
