"""Datasets yield batches and access profiles, and there are sets of tasks.

Models and plans are not known here.
"""
