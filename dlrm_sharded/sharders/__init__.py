"""One method, one file: heuristics, search, policies, plan files, planners of others; and the call
from a task to a plan with its report.

The search and the policies themselves are in `search` and `rl`.
"""
