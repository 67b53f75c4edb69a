"""Jobs whose ranks are threads of a test."""

import torch.distributed as dist

from dlrm_sharded.ranks.job_store import JobStore


class JobOfThreads(JobStore):
    """A rank of a job with a given store."""

    def __init__(self, rank: int, world_size: int, store: dist.Store) -> None:
        self.rank, self.world_size, self.store = rank, world_size, store
        self.timeout_s = 60
