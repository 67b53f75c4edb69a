"""A training run takes its steps here, from settings to result.

Configs become objects in `commands`.
"""
