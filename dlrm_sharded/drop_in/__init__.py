"""`ShardedPlanner` takes the place of TorchRec's planner for any model.

The model's owner trains it.
"""
