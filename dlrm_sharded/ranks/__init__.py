"""Processes that work together: their launch, meeting, process groups, devices and installed
versions.

What kind of machine they run on is in `hardware`.

What kind of machine they run on is in `hardware`.
"""
