"""Has datasets, which yield batches and access profiles, and sets of tasks.

Models and plans are not known here.
"""
