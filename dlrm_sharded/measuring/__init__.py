"""Times the stages of a plan, in a job or rank by rank.

Which plans are measured is decided in `calibration`.
"""
