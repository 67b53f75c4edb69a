"""Datasets yield batches and access profiles: synthetic tables, Criteo, Meta's lookups; there are
sets of tasks too.

This room knows neither models nor plans.
"""
