"""Cost models predict the cost of a plan, and bound it from below.

Nothing is measured or fitted here.
"""
