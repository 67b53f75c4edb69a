"""`ShardedPlanner` takes the place of TorchRec's planner: it plans a model's tables as runs plan
theirs, with any sharder, where its modules train them.

Training such a model is up to its owner.
"""
