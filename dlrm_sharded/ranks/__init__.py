"""Launches processes, connects them, and finds their devices.

Kinds of machines are in `hardware`.
"""
