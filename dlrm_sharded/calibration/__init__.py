"""Measures hardware, stores the samples, and fits a cost model to them.

Stages are timed in `measuring`.
"""
