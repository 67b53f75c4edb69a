"""A training run takes its steps here, from settings to result.

Configs end in `commands`.
"""
