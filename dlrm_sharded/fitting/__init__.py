"""Prices are fitted to measurements: from the start, as corrections of a prior, and by what runs
tell.

Where the measurements come from is up to `calibration` and the runs.
"""
