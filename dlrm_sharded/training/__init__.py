"""The loop: steps, validation, metrics, the memory that they need, and when checkpoints are due.

It knows neither search nor prices.
"""
