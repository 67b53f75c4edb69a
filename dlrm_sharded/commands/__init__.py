"""One module for each command, and what turns a config into objects.

No room below knows Hydra or a config.
"""
