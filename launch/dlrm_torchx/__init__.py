"""dlrm_sharded on TorchX: torchrun apps, schedulers, and sweeps of jobs.

A *job* is one combination of overrides in a sweep. Its *app* is the TorchX app that runs it. The
*driver* is the process that submits the jobs and waits for them; it is not a rank.
"""
