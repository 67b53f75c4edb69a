"""Processes work together here: they are launched, meet, form process groups, and know their
devices and installed versions.

What kind of machine they run on is in `hardware`.
"""
