"""Run the command `dlrm-advise` from a checkout."""

from dlrm_sharded.commands.advise import main

if __name__ == "__main__":
    main()
