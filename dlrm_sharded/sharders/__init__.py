"""Each sharder has a file, and `planning.py` makes a plan with its report.

Search and policies are in `search` and `rl`.
"""
