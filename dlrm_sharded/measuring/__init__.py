"""Times a plan's stages on all ranks together, or rank by rank.

Which plans are measured is decided in `calibration`.
"""
