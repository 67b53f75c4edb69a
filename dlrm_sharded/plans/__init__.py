"""Tables, tasks, plans, layouts, costs and reports are frozen values here.

No sharder or library is needed to make them.
"""
