"""The DLRM is here, with its optimizers and its sharded form: TorchRec's plans are made from ours,
and replicas are kept equal.

The loop that trains it is in `training`.
"""
