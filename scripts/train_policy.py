"""Run the command `dlrm-train-policy` from a checkout."""

from dlrm_sharded.commands.train_policy import main

if __name__ == "__main__":
    main()
