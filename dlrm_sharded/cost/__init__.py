"""Cost models predict the cost of a plan from features and the unit costs of lookups and
exchanges, and bound it from below.

Nothing is measured or fitted here.
"""
