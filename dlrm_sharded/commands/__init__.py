"""Each command has one module here, beside what turns a config into objects.

No package below knows Hydra or a config.
"""
