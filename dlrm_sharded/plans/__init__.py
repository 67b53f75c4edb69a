"""These are frozen values: tables, tasks, plans, layouts, costs and reports, and what makes a plan
valid.

Neither a method that makes plans nor a library is needed here.
"""
