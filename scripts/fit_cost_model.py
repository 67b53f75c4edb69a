"""Run the command `dlrm-fit-cost-model` from a checkout."""

from dlrm_sharded.commands.fit_cost_model import main

if __name__ == "__main__":
    main()
