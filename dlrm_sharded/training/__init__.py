"""The loop takes the steps, validates, computes metrics, estimates their memory, and decides when
checkpoints are due.

It knows neither search nor prices.
"""
