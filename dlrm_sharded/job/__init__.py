"""A training run takes ten steps here, from its settings to its result.

Configs end in `commands`, and settings come as objects.
"""
