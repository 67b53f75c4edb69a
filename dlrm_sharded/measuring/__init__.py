"""The stages of a plan are measured here: on the live modules of a job, or rank by rank on a bench.

Which plans are measured, and why, is decided in `calibration`.
"""
