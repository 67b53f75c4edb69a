"""Tables, tasks, plans, layouts, costs and reports are frozen values here.

No method or library is needed.
"""
