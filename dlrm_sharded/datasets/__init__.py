"""Datasets yield batches and access profiles: users' files of columns, synthetic tables, MLPerf's
and Meta's files; there are sets of tasks too.

It knows neither models nor plans.
"""
