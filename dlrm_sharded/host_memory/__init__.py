"""Tables lie in host memory, and GPUs cache their recent rows: this room has their miss ratios and
prices, and places them; no GPU has measured this yet.

The sharder that falls back on it is in `sharders`.
"""
