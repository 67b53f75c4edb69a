"""The steps of real runs are recorded on all ranks and explained: who waits for whom, and why.

Predicted steps are in `step`.
"""
