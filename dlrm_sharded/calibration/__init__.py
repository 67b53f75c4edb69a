"""Measures the stages, collects measurements of random plans, chooses those of a first start, fits
prices to them, and learns from runs.

What the prices are used for is in `cost`.
"""
