"""The DLRM, its optimizers and its sharded form: TorchRec's plans from ours, and replicas.

The loop that trains it is in `training`.
"""
