"""It has the training loop, validation, metrics, what decides when checkpoints are due, and the
estimate of a run's memory.

It knows neither search nor cost models.
"""
