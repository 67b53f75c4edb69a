"""What yields batches and access profiles: synthetic tables, Criteo, Meta's lookups; and sets of
tasks.

It knows neither models nor plans.
"""
