"""One training run in ten steps, from its settings to its result.

Configs end in `commands`, and settings come as objects.
"""
