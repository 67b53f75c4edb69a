"""Has the DLRM, its optimizers and its sharded form.

The loop that trains it is in `training`.
"""
