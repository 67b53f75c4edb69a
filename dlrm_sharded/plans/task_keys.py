"""The keys of task.json: where users set them, and their limits."""

MEMORY_KEYS = "topology.memory_gib, or memory_bytes in task.json"
"""Where users set the memory of a rank, for messages."""

OPTIMIZER_KEYS = ("bytes_per_element", "optimizer_bytes_per_row")
"""Keys of a topology that an optimizer of tables decides, in the order of `memory_of`."""

MAX_RANKS, MAX_BYTES = 2**20, 2**60
"""Limits beyond any real job, below which sums of sizes are exact in 64 bits."""

MIN_BANDWIDTH, MAX_BANDWIDTH = 1.0, 1e18
"""Limits beyond any real link, in bytes/s, between which predicted times are finite."""

BANDWIDTHS = ("intra_host_bytes_per_s", "inter_host_bytes_per_s")
"""Keys of a topology that are bandwidths; all are optional."""

MAX_BATCH_SIZE = 2**40
