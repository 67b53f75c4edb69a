"""Says why a plan costs what it costs.

It makes no plan and measures nothing.
"""
