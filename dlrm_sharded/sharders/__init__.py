"""One method, one file: heuristics, search, policies, TorchRec's planner, plan files; and the call
from a task to a plan with its report.

The search and the policies themselves are in `search` and `rl`.

The search and the policies themselves are in `search` and `rl`.
"""
