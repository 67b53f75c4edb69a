"""Each command has one module here, beside what turns a config into objects.

No room below knows Hydra or a config.
"""
