"""dlrm_sharded on TorchX: what a job is made of, where it runs, and sweeps of jobs."""
