"""Measures the stages, collects measurements of random plans, fits prices to them, and learns
from runs.

What the prices are used for is in `cost`.
"""
