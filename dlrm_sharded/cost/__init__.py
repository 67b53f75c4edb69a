"""What predicts the cost of a plan: features, prices of lookups and exchanges, the lower bound.

Nothing is measured or fitted here.
"""
