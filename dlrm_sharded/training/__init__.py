"""Has the training loop, validation, metrics, and the estimate of a run's memory.

It knows neither search nor cost models.
"""
