"""Each command has a module here, which turns its config into objects.

Packages below know no Hydra.
"""
