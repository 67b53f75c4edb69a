"""`ShardedPlanner` takes the place of TorchRec's planner: it plans a model's tables with any
sharder, as its modules train them.

Training such a model is up to its owner.
"""
