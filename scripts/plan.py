"""Run the command `dlrm-plan` from a checkout."""

from dlrm_sharded.commands.plan import main

if __name__ == "__main__":
    main()
