"""Tables lie in host memory, and GPUs cache their recent rows: this room has their miss ratios and
prices, and places them; one GPU has trained with them, none has measured them.

The sharder that falls back on it is in `sharders`.
"""
