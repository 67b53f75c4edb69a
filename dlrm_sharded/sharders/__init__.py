"""Each file is one method: heuristics, search, policies, plan files, planners of others;
`planning.py` makes a plan with its report.

The search and the policies themselves are in `search` and `rl`.
"""
