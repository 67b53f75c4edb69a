"""Processes are launched, meet, and know their devices here.

Kinds of machines are in `hardware`.
"""
