"""Run the command `dlrm-simulate` from a checkout."""

from dlrm_sharded.commands.simulate import main

if __name__ == "__main__":
    main()
